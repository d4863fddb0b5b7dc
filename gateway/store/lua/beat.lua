-- Writes the heartbeat of a gateway process, and returns which gateways are alive.
--
--   KEYS[1]  the list of gateways
--   ARGV[1]  id of this one
--   ARGV[2]  how long a beat counts, s
-- Result: {1 if its last beat still counted, else 0; {id, ms since its beat, id, ms, ...} of the gateways alive}
--
-- Keeps: a gateway whose last beat does not count any more is not in the list. A beat that lies ahead was written
-- before Redis' clock was set back; it counts as one of now, so that a gateway that is gone is not there for longer.
local clock = redis.call("TIME")
local now = clock[1] + clock[2] / 1000000
redis.call("ZREMRANGEBYSCORE", KEYS[1], "-inf", string.format("%.6f", now - ARGV[2]))
local ahead = redis.call("ZRANGEBYSCORE", KEYS[1], string.format("(%.6f", now + ARGV[2]), "+inf")
for _, id in ipairs(ahead) do redis.call("ZADD", KEYS[1], string.format("%.6f", now), id) end
local was_there = redis.call("ZSCORE", KEYS[1], ARGV[1])
redis.call("ZADD", KEYS[1], string.format("%.6f", now), ARGV[1])
local beats = redis.call("ZRANGE", KEYS[1], 0, -1, "WITHSCORES")
for i = 2, #beats, 2 do beats[i] = math.floor((now - beats[i]) * 1000) end
return {was_there and 1 or 0, beats}
