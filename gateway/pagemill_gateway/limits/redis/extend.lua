-- Add tokens to an open reservation, as many as the limits leave. The same rules as `MemoryStore.decide_more`.
-- KEYS: tokens of the minute, open reservations, tokens of the day and of the month in which it was booked, of the day and
--       of the month now.
-- ARGV: lease, tokens used so far, tokens wanted, limits of tokens, day and month ("" is none), milliseconds that the day
--       and the month are left, and the time ("" is the server's).
-- Returns the tokens added; -1: the reservation is not known here.
local lease, used, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local limits = {tokens = tonumber(ARGV[4]), day = tonumber(ARGV[5]), month = tonumber(ARGV[6])}
local day_left_ms, month_left_ms, now_ms = tonumber(ARGV[7]), tonumber(ARGV[8]), time_ms(ARGV[9])
local current = math.floor(now_ms / BUCKET_MS)
local bucket, open, reported = string.match(redis.call('HGET', KEYS[2], lease) or '', '^(%d+):(%d+):(%d+)$')
if not bucket then return -1 end
bucket, open, reported = tonumber(bucket), tonumber(open), tonumber(reported)

local rest = open - math.max(0, used - reported)
local excess = math.max(0, -rest)
rest = math.max(0, rest)
if bucket > current - WINDOW_BUCKETS and redis.call('HEXISTS', KEYS[1], bucket) == 1 then
  redis.call('HINCRBY', KEYS[1], bucket, 0 - rest)  -- not `-rest`: Lua's minus zero is no integer to Redis
end
redis.call('HINCRBY', KEYS[1], current, rest + excess)

local function charge(key, amount, left_ms)
  redis.call('INCRBY', key, amount)
  redis.call('PEXPIRE', key, left_ms + 3600000)
end

local function rebook(before, now, left_ms)
  if before == now then return charge(now, excess, left_ms) end
  if redis.call('EXISTS', before) == 1 then redis.call('INCRBY', before, 0 - rest) end
  charge(now, rest + excess, left_ms)
end

rebook(KEYS[3], KEYS[5], day_left_ms)
rebook(KEYS[4], KEYS[6], month_left_ms)
local granted = wanted
if limits.tokens then granted = math.min(granted, limits.tokens - used_in_window(KEYS[1], current)) end
if limits.day then granted = math.min(granted, limits.day - tonumber(redis.call('GET', KEYS[5]))) end
if limits.month then granted = math.min(granted, limits.month - tonumber(redis.call('GET', KEYS[6]))) end
granted = math.max(0, granted)
redis.call('HINCRBY', KEYS[1], current, granted)
redis.call('PEXPIRE', KEYS[1], (WINDOW_BUCKETS + 1) * BUCKET_MS)
charge(KEYS[5], granted, day_left_ms)
charge(KEYS[6], granted, month_left_ms)
local record = string.format('%.0f:%.0f:%.0f', current, rest + granted, math.max(used, reported))
redis.call('HSET', KEYS[2], lease, record)
return granted
