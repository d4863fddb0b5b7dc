-- Stores a response of a team, and drops the team's oldest ones if it would hold too many or too many bytes.
--
--   KEYS[1]  prefix of the team's responses
--   ARGV[1]  id
--   ARGV[2]  the response
--   ARGV[3]  lifetime, ms
--   ARGV[4]  maximum bytes of the team's responses
--   ARGV[5]  maximum number of them; 0: any number
--   ARGV[6]  "1": only if the response is there already
--   ARGV[7+] ids of the responses that it follows: they are kept as long as it
-- Result: 1: stored; 0: not stored, as it is larger than ARGV[4], or (ARGV[6]) not there any more; -1: not stored yet,
-- as one run may not drop enough of the oldest: run `make_room_response`, then this again. An error if Redis is full
--
-- Keeps: sizes are those of stored responses, and of expired ones until a run removes them, 500 at most; their sum is
-- at most ARGV[4], and their number ARGV[5].
local id, body, ttl, bound, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local clock = redis.call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Redis checks its limit of memory only at a script's first write, if that can take some. So the first is this one,
-- which writes nothing: no response has an empty id. After a deletion first, all that follows would pass unchecked.
local told = redis.pcall("SET", response_key(""), "", "XX")
local is_refused = type(told) == "table" and told.err ~= nil

local function drop(old)
  redis.call("DEL", response_key(old))  -- first: even a full Redis runs a script that begins with this
  local bytes = redis.call("HGET", response_sizes_key, old)
  if bytes then redis.call("HINCRBY", response_sizes_key, "all", -bytes) end
  redis.call("HDEL", response_sizes_key, old)
  redis.call("ZREM", responses_key, old)
end

-- A run drops at most 500 expired ones and MOST others: all expired ones of a team, or thousands of short ones to make
-- room for a long one, would hold up every other caller.
local MOST = 100
for _, old in ipairs(redis.call("ZRANGEBYSCORE", responses_key, "-inf", now, "LIMIT", 0, 500)) do drop(old) end
if ARGV[6] == "1" and not redis.call("ZSCORE", responses_key, id) then return 0 end
if is_refused and ARGV[6] ~= "1" then return told end
if #body > bound then
  drop(id)
  return 0
end
for i = 7, #ARGV do
  if redis.call("PEXPIRE", response_key(ARGV[i]), ttl) == 1 then
    redis.call("ZADD", responses_key, "XX", now + ttl, ARGV[i])
  end
end
local dropped = 0
local is_there = redis.call("ZSCORE", responses_key, id) and 1 or 0
while true do
  local all, own = unpack(redis.call("HMGET", response_sizes_key, "all", id))
  local others = redis.call("ZCARD", responses_key) - is_there
  if (tonumber(all) or 0) - (tonumber(own) or 0) + #body <= bound and (most == 0 or others < most) then break end
  if dropped == MOST then return -1 end
  local oldest = redis.call("ZRANGE", responses_key, 0, 1)
  local next = oldest[1] ~= id and oldest[1] or oldest[2]
  if not next then
    redis.call("DEL", response_sizes_key)
    break
  end
  drop(next)
  dropped = dropped + 1
end
drop(id)
redis.call("SET", response_key(id), body, "PX", ttl)
redis.call("ZADD", responses_key, now + ttl, id)
redis.call("HSET", response_sizes_key, id, #body)
redis.call("HINCRBY", response_sizes_key, "all", #body)
redis.call("PEXPIRE", responses_key, ttl)
redis.call("PEXPIRE", response_sizes_key, ttl)
return 1
