-- Corrects what a call was counted for, once it is known what the call took, and ends it.
--
--   ARGV[4]   the tick in which the call was admitted
--   ARGV[5]   requests to add to those of that tick: 0, or -1 for a call that counts for nothing
--   ARGV[6]   tokens to add: those that the call took beyond the estimate, or less than 0
--   ARGV[7]   nano units of money to add
--   ARGV[8]   when the day of its admission begins, unix seconds
--   ARGV[9]   when the month begins
--   ARGV[10+] per subject: its name; number of the window's tick ("" if it has no limits per minute); "1" if it has a
--             limit of tokens per day, per month, of calls under way, else "0"; number of budgets; and per budget its
--             field, and when the period of the call's admission begins
-- Result: {1}; {3}, {4, tick}: limits_gate.lua
--
-- Keeps: what a call did not take is given back where it was counted; what it took beyond counts as of now. Neither
-- reaches into a window or period that began later.
if log[3] ~= round[1] then return {3} end
local tick = floor(now / TICK)
local admitted, requests, tokens, cost = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local at = 10

-- Number of the entry of a tick among a window's older ones; nil: it has none, or no more.
local function entry_of(key, w, number)
  if admitted < w.head_tick then return nil end
  local low, high = w.head, w.tail - 1
  number = math.min(math.max(tonumber(number) or low, low), high)
  while low <= high do
    local when, r, t = match(call("HGET", key, "e" .. number) or "", "^(%d+) (%d+) (%d+)$")
    when = tonumber(when)
    if not when then return nil end
    if when == admitted then return number, tonumber(r), tonumber(t) end
    if when < admitted then low = number + 1 else high = number - 1 end
    number = floor((low + high) / 2)
  end
  return nil
end

local function settle_window(key, w, number, sets)
  local less = math.min(0, tokens)
  if w.tick == admitted then
    local less_r = math.max(requests, -w.last_r)
    less = math.max(less, -w.last_t)
    w.last_r, w.last_t, w.r, w.t = w.last_r + less_r, w.last_t + less, w.r + less_r, w.t + less
  elseif less < 0 or requests < 0 then
    local found, r, t = entry_of(key, w, number)
    if found then
      local less_r = math.max(requests, -r)
      less = math.max(less, -t)
      sets[#sets + 1], sets[#sets + 2] = "e" .. found, format("%d %.0f %.0f", admitted, r + less_r, t + less)
      w.r, w.t = w.r + less_r, w.t + less
    end
  end
  if tokens > 0 then window_add(w, tick > w.tick and tick or w.tick, 0, tokens, sets) end
  sets[#sets + 1], sets[#sets + 2] = "w", window_text(w)
end

local function settle_period(text, begin, more, field, sets)
  local value, counted = period_of(text, begin)
  if not text or tonumber(counted) > tonumber(begin) then return end
  sets[#sets + 1], sets[#sets + 2] = field, format("%s %.0f", begin, math.max(0, value + more))
end

while ARGV[at] do
  local name, budgets, sets = ARGV[at], tonumber(ARGV[at + 5]), {}
  local key = limits_subject_key(name)
  local fields = {"w", "c", "d", "m"}
  for b = 1, budgets do fields[4 + b] = ARGV[at + 4 + 2 * b] end
  local read = call("HMGET", key, unpack(fields))
  if ARGV[at + 1] ~= "" and read[1] and (tokens ~= 0 or requests ~= 0) then
    settle_window(key, window_of(key, read[1], tick), ARGV[at + 1], sets)
  end
  if ARGV[at + 2] == "1" then settle_period(read[3], ARGV[8], tokens, "d", sets) end
  if ARGV[at + 3] == "1" then settle_period(read[4], ARGV[9], tokens, "m", sets) end
  for b = 1, budgets do settle_period(read[4 + b], ARGV[at + 5 + 2 * b], cost, ARGV[at + 4 + 2 * b], sets) end
  if ARGV[at + 4] == "1" and read[2] then
    sets[#sets + 1], sets[#sets + 2] = "c", format("%s %d", born, math.max(0, calls_of(read[2]) - 1))
    local calls_key = limits_calls_key(ARGV[1])
    if call("HINCRBY", calls_key, name, -1) <= 0 then call("HDEL", calls_key, name) end
  end
  if #sets > 0 then call("HSET", key, unpack(sets)) end
  at = at + 6 + 2 * budgets
end
ran(0)
return {1}
