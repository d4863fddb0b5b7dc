-- Deletes a stored response.
--
--   KEYS[1]  prefix of the team's responses
--   ARGV[1]  id
-- Result: 1, or 0 when there was none
--
-- Keeps: the sizes are those of the responses that are there.
local id = ARGV[1]
local was_there = redis.call("DEL", response_key(id))  -- first: even a full Redis runs a script that begins with this
local bytes = redis.call("HGET", response_sizes_key, id)
if bytes then redis.call("HINCRBY", response_sizes_key, "all", -bytes) end
redis.call("HDEL", response_sizes_key, id)
redis.call("ZREM", responses_key, id)
return was_there
