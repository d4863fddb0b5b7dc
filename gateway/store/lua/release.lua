-- Gives a slot back, and grants it at once to the ticket that loses most by waiting.
--
--   ARGV[4]  id of the lease
--   ARGV[5]  its fencing token
--   ARGV[6]  virtual tokens that the call took; empty: as many as it was charged
-- Result: 1, or 0 if there is no lease with that token, and nothing was changed
--
-- Keeps: no slot is free while one of the first WINDOW x WINDOWS tickets is better off with it than without.
local lease = lease_read(call_read(ARGV[4]))
if not lease or lease.fence ~= ARGV[5] then return 0 end
local full = lease_drop(lease.worker, ARGV[4], lease)
if ARGV[6] ~= "" and lease.share then team_add(lease.team, tonumber(ARGV[6]) - lease.share, 0, 0) end
if num_waiting() > 0 then
  ledger_load({"v", "fence", "settling"})
  if full then
    -- The lease was beyond the worker's slots; perhaps another ticket is owed that place.
    select(2, overdraft())(WINDOWS * WINDOW)
  else
    line()({lease.worker})
  end
end
ledger_save()
return 1
