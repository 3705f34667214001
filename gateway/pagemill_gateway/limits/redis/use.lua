-- Return what an account has used, without changing it: the counts that `reserve.lua` compares with the limits.
-- KEYS: requests of the minute, tokens of the minute, running leases, tokens of the day, of the month.
-- ARGV: the time ("" is the server's).
local now_ms = time_ms(ARGV[1])
local current = math.floor(now_ms / BUCKET_MS)
return {used_in_window(KEYS[1], current), used_in_window(KEYS[2], current), num_running(KEYS[3], now_ms),
  tonumber(redis.call('GET', KEYS[4]) or 0), tonumber(redis.call('GET', KEYS[5]) or 0)}
