-- What every message that changes counters begins with: it runs if it is the process's next one.
--
--   ARGV[1]  id of the gateway process
--   ARGV[2]  its epoch
--   ARGV[3]  number of the message
-- Results: {3}: the process must begin anew (`limits_begin`); {4, tick}: the message was run before, and admitted its
-- call in that tick (0: it did not); {5, error}: a counter can't be read, as something else was written there
local number = tonumber(ARGV[3])
local log_key = limits_log_key(ARGV[1])
local round = call("HMGET", limits_round_key, "id", "until", "born")
local log = call("HMGET", log_key, "epoch", "number", "round")
local born = round[3]
if not round[1] or not log[2] or log[1] ~= ARGV[2] then return {3} end

local function ran(tick)
  call("HSET", log_key, "number", number, "o" .. number % OUTCOMES, format("%d %d", number, tick))
end

if number ~= log[2] + 1 then
  local before, tick = match(call("HGET", log_key, "o" .. number % OUTCOMES) or "", "^(%d+) (%d+)$")
  if tonumber(before) == number then return {4, tonumber(tick)} end
  return {3}
end
