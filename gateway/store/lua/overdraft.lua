-- Lends leases beyond a worker's slots to teams that have less than their share: the body of a function of some
-- scripts, after shared.lua and line.lua.
--
-- A worker whose record has an `overdraft` takes so many calls more than it has slots, and runs them in slices of time
-- (workers/engine/step/shares.py): a call of a team that has more than its share of the slots pauses for a call of a
-- team that has less. So a team that holds every slot does not keep others in the line until its answers end.
local LENT_AT_ONCE = 16 -- maximum loans in one run
local TRIES = 2        -- after so many tickets of a team were refused, its others are not asked in this run
local ticket_grant = select(4, line())

-- Returns team -> its leases of a worker, and its weight.
local function holders_read(worker)
  local holders = {}
  for _, id in ipairs(call("ZRANGE", worker_leases_key(worker), 0, -1)) do
    local lease = lease_read(call_read(id))
    local team = lease and lease.team or ""
    local held = holders[team] or {leases = 0, weight = lease and tonumber(lease.weight) or 1}
    held.leases = held.leases + 1
    holders[team] = held
  end
  return holders
end

local function held_in_all(team)
  return (select(3, team_read(team)))
end

-- Whether a ticket gets a lease of a worker without a free slot: its team has less than its share there, another one
-- more, and over all workers its team would have, for its weight, no more leases than that other one. A team without
-- any does not wait until others' answers end, however short they are: its first token would be as much later.
local function may_lend(record, holders, ticket, kv)
  local all, mine = 0, holders[ticket.team]
  for _, held in pairs(holders) do all = all + held.weight end
  if not mine then all = all + ticket.weight end
  local leases = mine and mine.leases or 0
  if leases > 0 and leases + 1 > record.slots * ticket.weight / all then return false end
  local in_all = held_in_all(ticket.team)
  for team, held in pairs(holders) do
    local beyond = held.leases - record.slots * held.weight / all
    if team ~= ticket.team and beyond > 0
        and (in_all == 0 or (in_all + 1) / ticket.weight <= held_in_all(team) / held.weight) then
      -- The KV cells of calls that pause come free.
      local room = (record.kv - record.kv_free) * math.max(beyond, 1) / record.leases
      if kv <= record.kv_free or kv <= record.kv_free + room then return true end
    end
  end
  return false
end

-- Grants tickets, in the order given, the leases that they are owed beyond the slots of a worker; it asks the first
-- `most` workers that a ticket names. Returns how many grants were made.
local function lend(ids, most)
  if #ids == 0 or settling() then return 0 end
  local workers, refused, lent = {}, {}, 0

  local function worker_read(name)
    local found = workers[name]
    if not found then
      local record = worker_record(name)
      local lends = record and not record.draining and record.leases > 0
          and record.leases < record.slots + record.overdraft
      found = {record = lends and record.overdraft > 0 and record, holders = lends and holders_read(name)}
      workers[name] = found
    end
    return found.record, found.holders
  end

  local function take(id, text, team, weight)
    local ticket = {team = team, weight = tonumber(weight) or 1}
    local asked = 0
    for worker, rate, kv in string.gmatch(match(text, "\n|([^\n]*)") or "", "([^|]+)=(%S+) (%d+)[^|]*|") do
      asked = asked + 1
      if asked > most then return false end
      local record, holders = worker_read(worker)
      if record and (tonumber(rate) or -1) >= 0 and may_lend(record, holders, ticket, tonumber(kv)) then
        local first = call_read(call("ZRANGE", queue_key, 0, 0)[1])
        ticket_grant(record, id, text, tonumber(kv), first)
        workers[worker] = nil
        return true
      end
    end
    return false
  end

  for at, text in ipairs(call("HMGET", calls_key, unpack(ids))) do
    local _, _, _, _, weight, _, team = ticket_read(text)
    if team and (refused[team] or 0) < TRIES then
      if take(ids[at], text, team, weight) then
        lent = lent + 1
        if lent == LENT_AT_ONCE then return lent end
      else
        refused[team] = (refused[team] or 0) + 1
      end
    end
  end
  return lent
end

-- Does the same for the first `up_to` tickets of the line. Returns how many grants were made.
local function lend_to_line(up_to)
  local lent, first = 0, 0
  while first < up_to do
    local ids = call("ZRANGE", queue_key, first, first + 4 * WINDOW - 1)
    if #ids == 0 then break end
    local here = lend(ids, WINDOW)
    lent, first = lent + here, first + #ids - here
    if lent >= LENT_AT_ONCE then break end
  end
  return lent
end

return lend, lend_to_line
