-- Returns the access records that have changed after a version, oldest change first, and how many records there are.
--
--   KEYS[1]  hash of keys, KEYS[2] hash of subjects, KEYS[3] zset of changes (accounts/protocol/change_records.lua)
--   ARGV[1]  the version up to which the gateway knows all changes
--   ARGV[2]  maximum number of changes
-- Result: number of keys, of subjects, then for each change member, version and record: empty if it was deleted, and
-- for the member with the score +inf, by which one tells that there are no more. A number is -1 if it may not be read.
--
-- Keeps: nothing is changed.
local KEY = "key:"

local function number_of(name)
  local number = redis.pcall("HLEN", name)
  if type(number) == "number" then return number end
  if string.find(number.err, "WRONGTYPE", 1, true) then return nil, number end
  return -1
end

local keys, wrong = number_of(KEYS[1])
if wrong then return wrong end
local subjects, wrong_too = number_of(KEYS[2])
if wrong_too then return wrong_too end

local told = {keys, subjects}
local found = redis.call("ZRANGEBYSCORE", KEYS[3], "(" .. ARGV[1], "+inf", "WITHSCORES", "LIMIT", 0, ARGV[2])
for at = 1, #found, 2 do
  local hash, field, record = KEYS[2], found[at], ""
  if string.sub(field, 1, #KEY) == KEY then hash, field = KEYS[1], string.sub(field, #KEY + 1) end
  if found[at + 1] ~= "inf" then record = redis.call("HGET", hash, field) or "" end
  told[#told + 1] = found[at]
  told[#told + 1] = found[at + 1]
  told[#told + 1] = record
end
return told
