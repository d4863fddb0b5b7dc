-- Raises counters of limits that are lower than the ledger says: Redis lost them, or they are newer than what they count.
--
--   KEYS[1]  the prefix of all names of limits
--   ARGV     for each counter four: the subject's name, the counter's field, when its period begins (unix seconds), and
--            what was counted in it at least
-- Result: for each counter 1, or 0 if it was as high already, or is of a later period.
--
-- Keeps: no counter falls. Fields and their form are those of gateway/store/lua/limits.lua.
local KEPT_MS = 40 * 86400000 -- outlives a month
local raised = {}

for at = 1, #ARGV, 4 do
  local key, field, begin, least = KEYS[1] .. "of:" .. ARGV[at], unpack(ARGV, at + 1, at + 3)
  local counted, value = string.match(redis.call("HGET", key, field) or "", "^(%d+) (%d+)$")
  counted, value = tonumber(counted) or 0, tonumber(value) or 0
  local is_lower = counted < tonumber(begin) or (counted == tonumber(begin) and value < tonumber(least))
  if is_lower then
    redis.call("HSET", key, field, begin .. " " .. least)
    redis.call("PEXPIRE", key, KEPT_MS)
  end
  raised[#raised + 1] = is_lower and 1 or 0
end
return raised
