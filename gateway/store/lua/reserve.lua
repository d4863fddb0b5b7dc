-- Counts a new call for all of its subjects, if all their limits have room for it; otherwise for none.
--
--   ARGV[4]   tokens that the call is estimated to take
--   ARGV[5]   nano units of money that it is estimated to cost
--   ARGV[6]   when the day begins, unix seconds
--   ARGV[7]   when the month begins
--   ARGV[8+]  per subject: its name; its limits of requests and of tokens per minute, tokens per day and per month,
--             calls under way (0: no such limit); number of budgets; and per budget its field, when its period begins,
--             and its amount in nano units (0: nothing is refused)
-- Result: {1, now, tick, numbers}: admitted. {0, now, tick, subject, limit, used, wait_ms, numbers}: refused by the
-- limit of a subject, both counted from 1 (budgets from 6 on), which wants to be waited for longest; wait_ms 0: until
-- its period ends, or a call does. {2, ms}: gateways report, ask again after so long. {3}, {4, tick}: limits_gate.lua
-- Numbers: per subject number of the window's newest tick, its requests and tokens; calls under way; tokens of day and
-- month; money of each budget
--
-- Keeps: no limit of any subject is passed; a call counts for all of its subjects or for none.
if log[3] ~= round[1] then return {3} end
local tick = floor(now / TICK)
if tonumber(round[2]) > now then
  ran(0)
  return {2, round[2] - now}
end
local tokens, cost = tonumber(ARGV[4]), tonumber(ARGV[5])
local subjects, worst, at = {}, nil, 8

local function refuse(place, limit, used, wait)
  local weight = wait > 0 and wait or limit == 5 and 0 or 2 ^ 52
  if not worst or weight > worst.weight then worst = {place, limit, used, wait, weight = weight} end
end

-- Milliseconds until so many requests and tokens of a window are over.
local function wait_of(key, w, requests, tokens)
  for number = w.head, math.min(w.tail, w.head + 32) do
    local when, r, t = w.tick, w.last_r, w.last_t
    if number < w.tail then when, r, t = match(call("HGET", key, "e" .. number) or "", "^(%d+) (%d+) (%d+)$") end
    requests, tokens = requests - (r or 0), tokens - (t or 0)
    if requests <= 0 and tokens <= 0 then return math.max(1, (when + WINDOW + 1) * TICK - now) end
  end
  return (WINDOW + 1) * TICK
end

while ARGV[at] do
  local key, budgets = limits_subject_key(ARGV[at]), tonumber(ARGV[at + 6])
  local fields = {"w", "c", "d", "m"}
  for b = 1, budgets do fields[4 + b] = ARGV[at + 4 + 3 * b] end
  local read = call("HMGET", key, unpack(fields))
  local w = window_of(key, read[1], tick)
  if w.open ~= "" then w = limits_merge().close(key, w, tick) end
  local s = {key = key, at = at, budgets = budgets, w = w, calls = calls_of(read[2]), money = {}}
  s.day, s.day_begin = period_of(read[3], ARGV[6])
  s.month, s.month_begin = period_of(read[4], ARGV[7])
  s.has_periods = budgets > 0 or ARGV[at + 3] ~= "0" or ARGV[at + 4] ~= "0"
  -- Its lifetime is set when it is made, in each period, and with each new tick.
  s.is_new = s.day == 0 and ARGV[at + 3] ~= "0" or s.month == 0 and ARGV[at + 4] ~= "0"
      or s.calls == 0 and ARGV[at + 5] ~= "0" or not (read[1] or read[2] or read[3] or read[4])
  local place = #subjects + 1
  subjects[place] = s
  local limit = tonumber(ARGV[at + 1])
  if limit > 0 and w.r >= limit then refuse(place, 1, w.r, wait_of(key, w, w.r + 1 - limit, 0)) end
  limit = tonumber(ARGV[at + 2])
  if limit > 0 and (w.t >= limit or w.t + tokens > limit) then
    refuse(place, 2, w.t, wait_of(key, w, 0, math.min(w.t, w.t + math.max(1, tokens) - limit)))
  end
  limit = tonumber(ARGV[at + 3])
  if limit > 0 and (s.day >= limit or s.day + tokens > limit) then refuse(place, 3, s.day, 0) end
  limit = tonumber(ARGV[at + 4])
  if limit > 0 and (s.month >= limit or s.month + tokens > limit) then refuse(place, 4, s.month, 0) end
  limit = tonumber(ARGV[at + 5])
  if limit > 0 and s.calls >= limit then refuse(place, 5, s.calls, 0) end
  for b = 1, budgets do
    local spent, begin = period_of(read[4 + b], ARGV[at + 5 + 3 * b])
    s.money[b] = {spent, begin}
    s.is_new = s.is_new or spent == 0
    limit = tonumber(ARGV[at + 6 + 3 * b])
    if limit > 0 and (spent >= limit or spent + cost > limit) then refuse(place, 5 + b, spent, 0) end
  end
  at = at + 7 + 3 * budgets
end

local function take(s)
  local sets, w = {}, s.w
  local first, ttl = s.at, s.is_new and KEPT or 0
  if ARGV[first + 1] ~= "0" or ARGV[first + 2] ~= "0" then
    window_add(w, tick > w.tick and tick or w.tick, 1, tokens, sets)
    sets[#sets + 1], sets[#sets + 2] = "w", window_text(w)
    if w.is_new then ttl = KEPT end
  end
  if ARGV[first + 3] ~= "0" then
    s.day = s.day + tokens
    sets[#sets + 1], sets[#sets + 2] = "d", format("%s %.0f", s.day_begin, s.day)
  end
  if ARGV[first + 4] ~= "0" then
    s.month = s.month + tokens
    sets[#sets + 1], sets[#sets + 2] = "m", format("%s %.0f", s.month_begin, s.month)
  end
  if ARGV[first + 5] ~= "0" then
    s.calls = s.calls + 1
    sets[#sets + 1], sets[#sets + 2] = "c", format("%s %d", born, s.calls)
    call("HINCRBY", limits_calls_key(ARGV[1]), ARGV[first], 1)
  end
  for b = 1, s.budgets do
    local money = s.money[b]
    money[1] = money[1] + cost
    sets[#sets + 1], sets[#sets + 2] = ARGV[first + 4 + 3 * b], format("%s %.0f", money[2], money[1])
  end
  if #sets > 0 then call("HSET", s.key, unpack(sets)) end
  if ttl > 0 then call("PEXPIRE", s.key, s.has_periods and KEPT_PERIODS or ttl) end
end

local result = worst and {0, now, tick, unpack(worst)} or {1, now, tick}
for _, s in ipairs(subjects) do
  if not worst then
    take(s)
  elseif s.w.changed then
    call("HSET", s.key, "w", window_text(s.w))
  end
  local n = #result
  result[n + 1], result[n + 2], result[n + 3], result[n + 4] = s.w.tail, s.w.r, s.w.t, s.calls
  result[n + 5], result[n + 6] = s.day, s.month
  for b = 1, s.budgets do result[n + 6 + b] = s.money[b][1] end
end
ran(worst and 0 or tick)
return result
