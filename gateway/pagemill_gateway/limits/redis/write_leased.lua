-- Runs one command on KEYS[1], if the caller holds the lease KEYS[2] (none given: always), and renews the lease.
-- ARGV: the command (empty: only renew), the owner of the lease, its milliseconds, the command's further arguments.
if KEYS[2] then
  if redis.call('GET', KEYS[2]) ~= ARGV[2] then
    return 0
  end
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
if ARGV[1] ~= '' then
  redis.call(ARGV[1], KEYS[1], unpack(ARGV, 4))
end
return 1
