-- This gateway lives. Returns how many do, so that each knows its share when nobody can be asked.
-- KEYS: gateways. ARGV: this one's name, milliseconds that it counts as alive.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now_ms + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
redis.call('PEXPIRE', KEYS[1], 10 * ARGV[2])
return redis.call('ZCARD', KEYS[1])
