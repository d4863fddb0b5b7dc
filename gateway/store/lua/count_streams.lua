-- Counts the bytes of a team's resumable streams, and removes the oldest ended ones while the team is over a limit.
--
--   KEYS[1]  prefix of the team's streams
--   ARGV[1]  maximum streams of the team
--   ARGV[2]  maximum bytes of its streams
--   ARGV[3]  lifetime of a running stream, ms
--   ARGV[4]  lifetime of an ended stream, ms
--   ARGV[5]  "1": the stream is a new one, and refused if the team runs as many as it may have
--   ARGV[6+] per stream: id, bytes, state: "running", "ended" or "gone"
-- Result: {number of running streams, then the ids of those that were removed}, or {-1}: refused, nothing is counted
--
-- Keeps: sizes are those of running and ended streams, and of expired ones until a run removes them, 500 of each at
-- most; ended streams stay only as far as all streams are within both limits.
local most, bound = tonumber(ARGV[1]), tonumber(ARGV[2])
local clock = redis.call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function forget(id)
  local bytes = redis.call("HGET", stream_sizes_key, id)
  if bytes then
    redis.call("HINCRBY", stream_sizes_key, "all", 0 - bytes)  -- a minus alone would make 0 a "-0"
    redis.call("HDEL", stream_sizes_key, id)
  end
  redis.call("ZREM", streams_key, id)
  redis.call("ZREM", streams_ended_key, id)
end

for i, name in ipairs({streams_key, streams_ended_key}) do
  for _, id in ipairs(redis.call("ZRANGEBYSCORE", name, "-inf", now, "LIMIT", 0, 500)) do forget(id) end
  local last = now + tonumber(ARGV[i + 2])
  for _, id in ipairs(redis.call("ZRANGEBYSCORE", name, "(" .. last, "+inf", "LIMIT", 0, 500)) do
    redis.call("ZADD", name, last, id)  -- Redis' clock was set back: the stream would count for that much longer
  end
end
if ARGV[5] == "1" and redis.call("ZCARD", streams_key) >= most then return {-1} end
for i = 6, #ARGV, 3 do
  local id, bytes, state = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  forget(id)
  if state ~= "gone" then
    local ended = state == "ended"
    redis.call("ZADD", ended and streams_ended_key or streams_key, now + tonumber(ARGV[ended and 4 or 3]), id)
    redis.call("HSET", stream_sizes_key, id, bytes)
    redis.call("HINCRBY", stream_sizes_key, "all", bytes)
  end
end
local running = redis.call("ZCARD", streams_key)
local result = {running}
while #result <= 500 do
  local ended = redis.call("ZCARD", streams_ended_key)
  local held = tonumber(redis.call("HGET", stream_sizes_key, "all")) or 0
  if ended == 0 or (running + ended <= most and held <= bound) then break end
  local oldest = redis.call("ZRANGE", streams_ended_key, 0, 0)[1]
  forget(oldest)
  result[#result + 1] = oldest
end
for _, name in ipairs({streams_key, streams_ended_key, stream_sizes_key}) do
  redis.call("PEXPIRE", name, math.max(tonumber(ARGV[3]), tonumber(ARGV[4])))
end
return result
