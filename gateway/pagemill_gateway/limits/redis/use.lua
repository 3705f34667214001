-- Return what an account has used, without changing it: the counts that `reserve.lua` compares with the limits.
-- KEYS: requests of the minute, tokens of the minute, running leases, tokens of the day, of the month.
-- ARGV: the time ("" is the server's).
local BUCKET_MS, WINDOW_BUCKETS = 1000, 61
local now_ms = tonumber(ARGV[1])
if not now_ms then
  local time = redis.call('TIME')
  now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end
local current = math.floor(now_ms / BUCKET_MS)

local function used(key)
  local sum, flat = 0, redis.call('HGETALL', key)
  for index = 1, #flat, 2 do
    if tonumber(flat[index]) > current - WINDOW_BUCKETS then sum = sum + tonumber(flat[index + 1]) end
  end
  return sum
end

local running = 0
for _, each in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], now_ms, '+inf')) do
  running = running + (tonumber(string.match(each, '|(%d+)$')) or 1)
end
return {used(KEYS[1]), used(KEYS[2]), running, tonumber(redis.call('GET', KEYS[4]) or 0),
  tonumber(redis.call('GET', KEYS[5]) or 0)}
