-- End one reservation with what was really used. Said twice it counts once: only an open reservation is settled.
-- KEYS: tokens of the minute, running leases, open reservations, tokens of the day and of the month of the reservation,
--       requests of the minute.
-- ARGV: lease, its name among the running ones, tokens used, the time ("" is the server's), and 1 where the reservation
--       may still be on its way on another connection: it must find that it is over when it arrives; 1 where its request
--       does not count either.
local lease, running, used, now_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), time_ms(ARGV[4])
redis.call('ZREM', KEYS[2], running)
local bucket, open, reported = string.match(redis.call('HGET', KEYS[3], lease) or '', '^(%d+):(%d+):(%d+)$')
if not bucket then
  if ARGV[5] == '1' then
    redis.call('HSET', KEYS[3], lease, 'over')
    redis.call('ZADD', KEYS[2], now_ms - 1, running)
  end
  return 0
end
redis.call('HDEL', KEYS[3], lease)

bucket = tonumber(bucket)
local current, difference = math.floor(now_ms / BUCKET_MS), math.max(0, used - tonumber(reported)) - tonumber(open)
if difference > 0 then
  redis.call('HINCRBY', KEYS[1], current, difference)
  redis.call('PEXPIRE', KEYS[1], (WINDOW_BUCKETS + 1) * BUCKET_MS)
elseif bucket > current - WINDOW_BUCKETS and redis.call('HEXISTS', KEYS[1], bucket) == 1 then
  redis.call('HINCRBY', KEYS[1], bucket, difference)
end
if ARGV[6] == '1' and redis.call('HEXISTS', KEYS[6], bucket) == 1 then
  redis.call('HINCRBY', KEYS[6], bucket, -1)
end
for index = 4, 5 do
  if redis.call('EXISTS', KEYS[index]) == 1 then redis.call('INCRBY', KEYS[index], difference) end
end
return 1
