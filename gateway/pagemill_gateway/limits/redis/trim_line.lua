-- Removes the last line of the string KEYS[1] if it does not end with a line break.
local size = redis.call('STRLEN', KEYS[1])
local last = size
while last > 0 do
  local begin = math.max(0, last - 65536)
  local place = string.match(redis.call('GETRANGE', KEYS[1], begin, last - 1), '^.*()\n')
  if place then
    local keep = begin + place
    if keep < size then
      redis.call('SET', KEYS[1], redis.call('GETRANGE', KEYS[1], 0, keep - 1))
    end
    return keep
  end
  last = begin
end
if size > 0 then
  redis.call('DEL', KEYS[1])
end
return 0
