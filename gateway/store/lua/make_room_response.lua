-- Drops the oldest responses of a team until the rest are few and short enough for one more; at most 100 in one run.
--
--   KEYS[1]  prefix of the team's responses
--   ARGV[1]  maximum bytes of the responses that stay
--   ARGV[2]  maximum number of the team's responses, one more included; 0: any number
-- Result: 1 when it is done, 0 when it is to be run again
--
-- Keeps: the sizes are those of the responses that are there.
local most = tonumber(ARGV[2])
for _ = 1, 100 do
  local held = tonumber(redis.call("HGET", response_sizes_key, "all")) or 0
  if held <= tonumber(ARGV[1]) and (most == 0 or redis.call("ZCARD", responses_key) < most) then return 1 end
  local oldest = redis.call("ZRANGE", responses_key, 0, 0)[1]
  if not oldest then
    redis.call("DEL", response_sizes_key)
    return 1
  end
  redis.call("DEL", response_key(oldest))  -- first: even a full Redis runs a script that begins with this
  local bytes = redis.call("HGET", response_sizes_key, oldest)
  if bytes then redis.call("HINCRBY", response_sizes_key, "all", -bytes) end
  redis.call("HDEL", response_sizes_key, oldest)
  redis.call("ZREM", responses_key, oldest)
end
return 0
