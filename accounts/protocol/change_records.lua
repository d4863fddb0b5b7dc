-- Changes records of access in Redis, and gives each change a version, by which gateways find what has changed.
--
--   KEYS[1]  hash of keys, KEYS[2] hash of subjects, KEYS[3] zset of changes, KEYS[4] position of the accounts database
--   ARGV     the position that KEYS[4] has to have, and its next one; both empty: the position stays as it is;
--            then for each change three: "put", "offer" (put unless the field exists) or "delete"; the member of KEYS[3]
--            (`key:NAME`, or a subject's field, such as `team:NAME`); the sealed record, empty for "delete"
-- Result: for each change 1, or 0 if everything was so already; -1: nothing was changed, as the position is another.
--
-- Keeps: no record changes without a version above all earlier ones, which is the time in microseconds where clocks go
-- forward. One member, `begun:TIME`, has the score +inf: another one means that the zset was lost meanwhile. Changes of
-- more than an hour ago are dropped, a few at a time: gateways read the changes every second, and whole hashes if not.
local KEPT_US, DROPPED_AT_ONCE = 3600 * 1e6, 100
local KEY = "key:"

local before, after = ARGV[1], ARGV[2]
if after ~= "" and (redis.call("GET", KEYS[4]) or "") ~= before then return -1 end

local clock = redis.call("TIME")
local now = clock[1] * 1e6 + clock[2]
local function text(number) return string.format("%.0f", number) end -- Lua itself writes 14 digits only

local version = now
local top = redis.call("ZRANGE", KEYS[3], -2, -1, "WITHSCORES")
if #top == 0 or tonumber(top[#top]) ~= math.huge then
  redis.call("ZADD", KEYS[3], "+inf", "begun:" .. text(now))
end
for at = 2, #top, 2 do
  local score = tonumber(top[at])
  if score ~= math.huge and score >= version then version = score + 1 end
end

local function change(what, member, record)
  local hash, field = KEYS[2], member
  if string.sub(member, 1, #KEY) == KEY then hash, field = KEYS[1], string.sub(member, #KEY + 1) end
  if what == "delete" then return redis.call("HDEL", hash, field) end
  if what == "offer" then return redis.call("HSETNX", hash, field, record) end
  if redis.call("HGET", hash, field) == record then return 0 end
  redis.call("HSET", hash, field, record)
  return 1
end

local changed = {}
for at = 3, #ARGV, 3 do
  local is_new = change(ARGV[at], ARGV[at + 1], ARGV[at + 2])
  if is_new == 1 then
    redis.call("ZADD", KEYS[3], text(version), ARGV[at + 1])
    version = version + 1
  end
  changed[#changed + 1] = is_new
end
local old = redis.call("ZRANGEBYSCORE", KEYS[3], "-inf", text(now - KEPT_US), "LIMIT", 0, DROPPED_AT_ONCE)
if #old > 0 then redis.call("ZREM", KEYS[3], unpack(old)) end
if after ~= "" then redis.call("SET", KEYS[4], after) end
return changed
