-- Stands before the scripts that count: the buckets of a minute, the time, and sums that several of them need.
local BUCKET_MS, WINDOW_BUCKETS = 1000, 61

local function time_ms(given)
  if tonumber(given) then return tonumber(given) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function used_in_window(key, current)
  local sum, flat = 0, redis.call('HGETALL', key)
  for index = 1, #flat, 2 do
    if tonumber(flat[index]) > current - WINDOW_BUCKETS then sum = sum + tonumber(flat[index + 1]) end
  end
  return sum
end

local function num_running(key, now_ms)
  local count = 0
  for _, each in ipairs(redis.call('ZRANGEBYSCORE', key, now_ms, '+inf')) do
    count = count + (tonumber(string.match(each, '|(%d+)$')) or 1)
  end
  return count
end

