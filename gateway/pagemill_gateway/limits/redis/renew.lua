-- These requests still run; whoever does not say so in time is taken for dead and gives its places back.
-- KEYS: running leases, open reservations. ARGV: milliseconds that a lease lives, the leases.
local time = redis.call('TIME')
local expires_ms = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], expires_ms, ARGV[index]) end
redis.call('PEXPIRE', KEYS[1], 60 * ARGV[1])
redis.call('PEXPIRE', KEYS[2], 60 * ARGV[1])
return #ARGV - 1
