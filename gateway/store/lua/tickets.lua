-- Ends tickets: the body of a function of some scripts, after shared.lua.

-- Removes a waiting ticket that will not be served, and gives its team the charge back.
local function ticket_drop(id, text)
  local _, _, _, share, _, _, team = ticket_read(text)
  call("ZREM", queue_key, id)
  call("ZREM", tickets_key, id)
  call("HDEL", calls_key, id)
  call("HDEL", passed_key, id)
  if team then team_add(team, -(tonumber(share) or 0), -1, 0) end
end

-- Ends a call, whatever it has become of: ticket, grant or lease. Returns the worker that has a slot less to care for;
-- nil: it had none.
local function call_drop(id, text)
  local lease = lease_read(text)
  if not lease then
    ticket_drop(id, text)
    return nil
  end
  local ticket = lease.granted and lease.ticket
  lease.granted = false
  lease_drop(lease.worker, id, lease)
  team_add(lease.team, -(lease.share or 0), ticket and -1 or 0, 0)
  if ticket then
    call("ZREM", tickets_key, id)
    call("HDEL", passed_key, id)
  end
  return lease.worker
end

return ticket_drop, call_drop
