-- Gives free slots to waiting tickets: the body of a function of some scripts, after shared.lua.
local find = string.find
local WORKERS = 2048   -- workers of a model looked at in one run: another program may have written more names
local IN_VAIN = 4      -- after so many workers that no ticket wanted, it is checked first whether one can
local MOST_PASSED = 8  -- a ticket that was overtaken so often is not overtaken again
local MET = 1e9        -- rate of a bid whose deadline can be met on this worker only: above all other rates
local NONE = 48        -- the byte "0", with which a ticket begins that has no deadline

-- Grants a waiting ticket a lease. `first`: the record of the ticket at the head of the line. A ticket whose record is
-- gone, as in a Redis that evicts keys, leaves the line until its gateway re-reads it.
local function ticket_grant(record, id, text, kv, first)
  local gateway, start, _, share, weight, _, team = ticket_read(text)
  call("ZREM", queue_key, id)
  if not gateway then return end
  start = tonumber(start) or 0
  -- No later than the first ticket's start: after a grant far behind, a team that comes back would stand behind that.
  if first ~= text then start = math.min(start, tonumber((select(2, ticket_read(first)))) or start) end
  virtual_time_reaches(start)
  lease_take(record, id, gateway, GRANT_TTL, kv, nil, team, weight, share, text)
  team_add(team, 0, 0, 1)
  call("PUBLISH", grants_channel(gateway), id)
end

-- Gives the free slots of these workers to waiting tickets; a ticket that no slot suits keeps its place. `missed`:
-- gateways whose tickets get nothing this time. `newcomer`: a ticket that is asked wherever in the line it stands.
-- `windows`: how many windows of the line to ask. Returns how many grants were made.
--
-- A ticket whose gateway is gone can get a grant until a sweep has found it; nobody claims that, so it goes to another.
local function grant_from_line(workers, missed, newcomer, windows)
  local line = {} -- number of a window -> its tickets, read once until the line changes
  local wants     -- worker ("": any) -> KV tokens of the smallest call that wants it; nil: not read yet

  local function read(ids)
    if #ids == 0 then return {ids = ids} end
    local texts, passed = call("HMGET", calls_key, unpack(ids)), call("HMGET", passed_key, "", unpack(ids))
    return {ids = ids, texts = texts, passed = passed}
  end

  local function window(number)
    if not line[number] then
      line[number] = read(call("ZRANGE", queue_key, number * WINDOW, (number + 1) * WINDOW - 1))
    end
    return line[number]
  end

  -- Whether a ticket goes first because it can meet its deadline on this worker only. It does not pass `first`, the
  -- first in line that wants the slot, if that is another team's with a deadline still ahead: a team that asks for more
  -- than its share must not make other teams miss their deadlines.
  local function is_urgent(text, deadline, cost, other, first)
    if now + cost > deadline or now + other <= deadline then return false end
    if not first or tonumber(match(first, "^%d+")) <= now then return true end
    local gateway, _, _, _, _, _, team = ticket_read(first)
    local own_gateway, _, _, _, _, _, own = ticket_read(text)
    return gateway == own_gateway and team == own
  end

  -- Returns the ticket of a window that gets a slot of an open worker; nil: none does. If the second value is true,
  -- none behind them may get it either. Adds those that want it to `before`, in line, with their next number of
  -- overtakings.
  local function choose(record, tickets, before)
    local name, blank = "|" .. record.worker .. "=", " " .. record.worker .. " "
    local best, most, texts, all_passed = nil, 0, tickets.texts, tickets.passed
    for at, id in ipairs(tickets.ids) do
      local text = texts[at]
      local rate, kv, from, left_out, _ -- left_out: its first byte
      if text and not (missed and missed[ticket_read(text)]) then
        _, from = find(text, name, 1, true)
        if from then
          rate, kv = match(text, "^(%S+) (%d+)", from + 1)
        else
          rate, kv, left_out = match(text, "^%d+\n(%S+) (%d+)[^\n]*\n(.)")
          if left_out == " " and find(match(text, "^%d+\n[^\n]*\n([^\n]*)"), blank, 1, true) then rate = nil end
        end
        rate, kv = tonumber(rate), tonumber(kv)
      end
      if rate and rate >= 0 then
        local fits, passed = kv_fits(record, kv), tonumber(all_passed[at + 1]) or 0
        if passed >= MOST_PASSED then
          if fits then return {id = id, text = text, kv = kv, num_before = 0}, true end
          -- Due, but it does not fit yet: on the worker that it names first, no other takes the room it waits for.
          if find(text, "\n" .. name, 1, true) then return nil, true end
        end
        -- Tickets that can meet their deadline only here come first, and among these the earliest deadline.
        if string.byte(text) ~= NONE then
          local deadline = tonumber(match(text, "^%d+"))
          local named = "^%S+ %d+ (%S+) ([^|]+)"
          local cost, other = match(text, from and named or "^%d+\n%S+ %d+ (%S+) (%S+)", from and from + 1)
          if deadline and cost and is_urgent(text, deadline, tonumber(cost), tonumber(other), before.first) then
            rate = MET + 1e9 / (deadline - now + 1)
          end
        end
        if fits and (not best or rate > most) then
          best, most = {id = id, text = text, kv = kv, num_before = #before / 2}, rate
        end
        before.first = before.first or text
        before[#before + 1], before[#before + 2] = id, passed + 1
      end
    end
    return best
  end

  local function choose_from_line(record)
    local before, behind = {}, newcomer
    for number = 0, windows - 1 do
      local tickets = window(number)
      local ticket, over = choose(record, tickets, before)
      if ticket or over then return ticket, before end
      if #tickets.ids == 0 then return nil end
      for _, id in ipairs(tickets.ids) do
        if id == behind then behind = nil end
      end
    end
    -- The newcomer stands behind all that were asked.
    if behind then return choose(record, read({behind}), before), before end
  end

  -- Whether any ticket in the windows can want a worker: quicker than asking each ticket, where many workers are open.
  local function may_be_wanted(record)
    if not wants then
      wants = {}
      local function note(worker, rate, kv)
        if (tonumber(rate) or -1) >= 0 then wants[worker] = math.min(wants[worker] or math.huge, tonumber(kv)) end
      end
      for number = 0, windows - 1 do
        for at in ipairs(window(number).ids) do
          local text = window(number).texts[at]
          if text then
            local rate, kv = match(text, "^%d+\n(%S+) (%d+)")
            if rate then note("", rate, kv) end
            local named = match(text, "\n|([^\n]*)") or ""
            for worker, named_rate, named_kv in string.gmatch(named, "([^|]+)=(%S+) (%d+)[^|]*|") do
              note(worker, named_rate, named_kv)
            end
          end
        end
      end
    end
    return kv_fits(record, math.min(wants[record.worker] or math.huge, wants[""] or math.huge))
        and (wants[record.worker] or wants[""]) ~= nil
  end

  local granted, in_vain = 0, 0
  for _, worker in ipairs(workers) do
    local record = open_worker(worker)
    while record and record.leases < record.slots and (in_vain < IN_VAIN or may_be_wanted(record)) do
      local ticket, before = choose_from_line(record)
      if not ticket then
        in_vain = in_vain + 1
        break
      end
      ticket_grant(record, ticket.id, ticket.text, ticket.kv, line[0].texts[1])
      -- Overtaken are those that wanted the slot too and stood before the ticket that got it.
      if ticket.num_before > 0 then
        if not line[0].passed[1] then call("HSET", passed_key, "", LONG) end
        call("HSET", passed_key, unpack(before, 1, 2 * ticket.num_before))
      end
      if ticket.id == newcomer then newcomer = nil end
      granted, line, wants = granted + 1, {}, nil
    end
  end
  return granted
end

local function grant(workers, missed, newcomer, windows)
  if #workers == 0 or num_waiting() == 0 or settling() then return 0 end
  return grant_from_line(workers, missed, newcomer, windows or WINDOWS)
end

-- Returns the names of workers to look at: all, or WORKERS at random where another program has written more.
local function workers_some()
  return call("SRANDMEMBER", workers_key, WORKERS)
end

local function grant_all(missed)
  return grant(workers_some(), missed, nil, WINDOWS_OF_ALL)
end

return grant, grant_all, workers_some, ticket_grant
