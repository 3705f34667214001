-- Reserve room for one request, all of it or nothing. The same rules as `memory.py` and `window.py`, which say why.
-- KEYS: requests of the minute, tokens of the minute, running leases, open reservations, tokens of the day, of the month.
-- ARGV: lease, tokens, sequences, limits of requests, tokens, concurrency, day and month ("" is none), milliseconds that
--       a lease lives, that the day and the month are left, and the time ("" is the server's).
-- Running leases are `LEASE|SEQUENCES`; an open reservation is `BUCKET:OPEN:USED`, or `over`.
local lease, amount, sequences = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local limits = {requests = tonumber(ARGV[4]), tokens = tonumber(ARGV[5]), concurrency = tonumber(ARGV[6]),
  day = tonumber(ARGV[7]), month = tonumber(ARGV[8])}
local lease_ms, day_left_ms, month_left_ms = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local now_ms = time_ms(ARGV[12])
local current = math.floor(now_ms / BUCKET_MS)

local function gone_ms(bucket)
  return (bucket + WINDOW_BUCKETS) * BUCKET_MS
end

local function window_of(key)
  local used, buckets, flat = 0, {}, redis.call('HGETALL', key)
  for index = 1, #flat, 2 do
    local bucket, amount = tonumber(flat[index]), tonumber(flat[index + 1])
    if bucket <= current - WINDOW_BUCKETS then
      redis.call('HDEL', key, flat[index])
    else
      used = used + amount
      buckets[#buckets + 1] = {number = bucket, amount = amount}
    end
  end
  table.sort(buckets, function(a, b) return a.number < b.number end)
  return {used = used, buckets = buckets}
end

local function wait_ms(window, wanted, limit)
  local excess = window.used + wanted - limit
  if excess <= 0 then return 0 end
  for _, bucket in ipairs(window.buckets) do
    excess = excess - bucket.amount
    if excess <= 0 then return gone_ms(bucket.number) - now_ms end
  end
  return WINDOW_BUCKETS * BUCKET_MS
end

local function reset_ms(window, added)
  if added > 0 then return gone_ms(current) - now_ms end
  for index = #window.buckets, 1, -1 do
    if window.buckets[index].amount > 0 then return gone_ms(window.buckets[index].number) - now_ms end
  end
  return 0
end

if redis.call('HGET', KEYS[4], lease) == 'over' then
  return {'concurrency', 0, 0, 0, 0, 0}  -- whoever asked is gone, and nobody reads this
end
local requests, tokens = window_of(KEYS[1]), window_of(KEYS[2])

local function refusal()
  if limits.month and amount > 0 and tonumber(redis.call('GET', KEYS[6]) or 0) + amount > limits.month then
    return 'budget_month', month_left_ms
  end
  if limits.day and amount > 0 and tonumber(redis.call('GET', KEYS[5]) or 0) + amount > limits.day then
    return 'budget_day', day_left_ms
  end
  local wait = limits.requests and wait_ms(requests, 1, limits.requests) or 0
  if wait > 0 then return 'requests', wait end
  wait = limits.tokens and amount > 0 and wait_ms(tokens, amount, limits.tokens) or 0
  if wait > 0 then return 'tokens', wait end
  if limits.concurrency and num_running(KEYS[3], now_ms) + sequences > limits.concurrency then return 'concurrency', 1000 end
  return '', 0
end

local function drop_abandoned()
  -- Whoever held these died long ago. What was reserved stays charged: much of it was surely used.
  local abandoned = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now_ms - 30 * lease_ms, 'LIMIT', 0, 100)
  for _, each in ipairs(abandoned) do
    redis.call('ZREM', KEYS[3], each)
    redis.call('HDEL', KEYS[4], (string.gsub(each, '|%d+$', '')))
  end
end

local function charge(key, left_ms)
  redis.call('INCRBY', key, amount)
  redis.call('PEXPIRE', key, left_ms + 3600000)
end

drop_abandoned()
local refused, retry_ms = refusal()
local added, added_tokens = 0, 0
if refused == '' then
  added, added_tokens = 1, amount
  redis.call('HINCRBY', KEYS[1], current, 1)
  redis.call('HINCRBY', KEYS[2], current, amount)
  redis.call('PEXPIRE', KEYS[1], (WINDOW_BUCKETS + 1) * BUCKET_MS)
  redis.call('PEXPIRE', KEYS[2], (WINDOW_BUCKETS + 1) * BUCKET_MS)
  redis.call('ZADD', KEYS[3], now_ms + lease_ms, lease .. '|' .. sequences)
  redis.call('HSET', KEYS[4], lease, string.format('%.0f:%.0f:0', current, amount))
  redis.call('PEXPIRE', KEYS[3], 60 * lease_ms)
  redis.call('PEXPIRE', KEYS[4], 60 * lease_ms)
  charge(KEYS[5], day_left_ms)
  charge(KEYS[6], month_left_ms)
end
return {refused, retry_ms, requests.used + added, reset_ms(requests, added), tokens.used + added_tokens,
  reset_ms(tokens, added_tokens)}
