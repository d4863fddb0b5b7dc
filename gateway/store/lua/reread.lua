-- Re-reads this gateway's open tickets, keeps them alive and renews their bids. It also finds grants missed on pub/sub.
--
--   ARGV[4]   how long to settle (shared.lua) if Redis has lost its data, ms
--   ARGV[5+]  per ticket: id, lifetime in ms, team, its weight, charge, start, rank (from `acquire`), ms within which
--             its first token is wanted, bids (empty: as they were), number of workers to take at once, those workers
-- Result: {positions in the line, one per ticket, 0 for those that hold a grant}
--
-- Keeps: a ticket that Redis has lost is back at its old place, before everyone who came after it.
local NO_BIDS = "\n\n|" -- of a ticket that was lost, until its gateway sends its bids
local perhaps_open, ticket_text, ticket_file = filing()
local places, wanted, missing, i = {}, {}, false, 5
while i <= #ARGV do
  local id, ttl, team, num_take, bids = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], tonumber(ARGV[i + 9]), ARGV[i + 8]
  local known = call("ZADD", tickets_key, "XX", "CH", now + ttl, id) == 1 or call("ZSCORE", tickets_key, id)
  local text = call_read(id)
  local granted = lease_read(text) ~= nil
  if not granted then
    local start, rank = ARGV[i + 5], ARGV[i + 6]
    local gateway, _, _, _, _, filed = ticket_read(text)
    local lost = not (known and gateway)
    if lost and bids == "" then bids = NO_BIDS end
    if bids ~= "" then
      text = ticket_text(ARGV[i + 7], bids, start, rank, ARGV[i + 4], ARGV[i + 3], filed or format("%d", now), team)
      call("HSET", calls_key, id, text)
    end
    if lost then
      team_add(team, 0, known and 0 or 1, 0)
      if virtual_time() < tonumber(start) then
        virtual_time_reaches(tonumber(start))
        settle(tonumber(ARGV[4]))
      end
      ticket_file(id, text, rank, ttl)
      missing = true
    end
  end
  for at = i + 10, i + 9 + num_take do wanted[ARGV[at]] = true end
  places[#places + 1] = granted and 0 or (call("ZRANK", queue_key, id) or 0) + 1
  i = i + 10 + num_take
end
local grant, grant_all = line()
if missing then
  grant_all()
else
  -- With its new bids, a ticket may want a free slot that none wanted before.
  local workers = {}
  for worker in pairs(wanted) do workers[#workers + 1] = worker end
  grant(perhaps_open(workers))
end
ledger_save()
return places
