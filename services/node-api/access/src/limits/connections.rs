//! Slots of connections.
//!
//! A connection is untrusted until it shows a verified client certificate or until a request on it is
//! authorized. Untrusted connections have few slots and a short deadline, and a new one displaces an old one,
//! so that a client that fills the slots does not lock others out.
//!
//! A connection of a user counts for its first user, also if requests of other users follow on it. At a
//! limit, it displaces the connection that has been idle longest, of the user that has most. A connection
//! with a request in flight is never displaced.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::{Client, Limits, Network, Pool};

#[derive(Debug)]
struct Connection {
    network: Network,
    /// The first user; none while the connection is untrusted.
    client: Option<Client>,
    /// Requests whose response has not been sent completely, and upgraded connections.
    in_flight: usize,
    /// Position among all events since which no request is in flight.
    idle_since: u64,
    displaced: CancellationToken,
}

impl Connection {
    fn is_stranger(&self) -> bool {
        self.client.is_none()
    }
}

/// The decision about a connection that needs a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    Admit,
    /// Admit it in place of another connection.
    Displace(u64),
    Refuse,
}

#[derive(Debug, Default)]
struct Table {
    /// Id of the next connection, and number of the next event. Both grow, so the smallest is the oldest.
    next: u64,
    open: HashMap<u64, Connection>,
}

impl Table {
    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next = number.saturating_add(1);
        number
    }

    /// Decides about a connection that was accepted: at the limit, it displaces the oldest one of the network
    /// that has most.
    fn decide_entry(&self, limits: &Limits) -> Decision {
        let mut networks: HashMap<Network, (usize, u64)> = HashMap::new();
        let mut strangers = 0_usize;
        for (id, connection) in self.open.iter().filter(|(_, c)| c.is_stranger()) {
            let (many, oldest) = networks.entry(connection.network).or_insert((0, *id));
            (*many, *oldest) = (many.saturating_add(1), (*oldest).min(*id));
            strangers = strangers.saturating_add(1);
        }
        if strangers < limits.strangers {
            return Decision::Admit;
        }
        let fullest =
            networks.into_values().max_by_key(|(many, oldest)| (*many, u64::MAX.saturating_sub(*oldest)));
        fullest.map_or(Decision::Refuse, |(_, oldest)| Decision::Displace(oldest))
    }

    /// Decides about an untrusted connection of which the client is known.
    fn decide_claim(&self, client: &Client, limits: &Limits) -> Decision {
        let share = limits.connections.of(client.pool());
        let in_pool = || {
            let all = self.open.iter();
            all.filter_map(|(id, c)| Some((id, c, c.client.as_ref().filter(|c| c.pool() == client.pool())?)))
        };
        let mut held: HashMap<&Client, usize> = HashMap::new();
        for (.., owner) in in_pool() {
            let many = held.entry(owner).or_default();
            *many = many.saturating_add(1);
        }
        let many = |owner: &Client| held.get(owner).copied().unwrap_or(0);
        let own = many(client);
        let has_share = own >= share.each;
        if !has_share && held.values().sum::<usize>() < share.all {
            return Decision::Admit;
        }
        let gives_way = |owner: &Client| owner == client && own > 0 || !has_share && many(owner) > own;
        let idle = in_pool().filter(|(_, c, owner)| c.in_flight == 0 && gives_way(owner));
        let first = idle.max_by_key(|(_, c, owner)| (many(owner), u64::MAX.saturating_sub(c.idle_since)));
        first.map_or(Decision::Refuse, |(id, ..)| Decision::Displace(*id))
    }

    /// Carries out a decision. Returns whether the connection is admitted.
    fn apply(&mut self, decision: Decision) -> bool {
        match decision {
            Decision::Admit => true,
            Decision::Displace(id) => {
                let displaced = self.open.remove(&id);
                displaced.inspect(|connection| connection.displaced.cancel()).is_some()
            }
            Decision::Refuse => false,
        }
    }
}

/// Admits connections to slots, and counts the open ones.
#[derive(Debug, Clone, Default)]
pub struct ConnectionLimiter(Arc<Mutex<Table>>);

/// An open connection. Its slot is free when this is dropped or displaced.
#[derive(Debug)]
pub struct ConnectionSlot {
    gate: ConnectionLimiter,
    id: u64,
    displaced: CancellationToken,
    /// Kind of the slot; not set while the connection is untrusted.
    pool: OnceLock<Pool>,
}

/// The client has its share of connections, and all of them are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many connections of this user are open")]
pub struct ShareExceeded;

impl ConnectionLimiter {
    /// Admits a connection as untrusted, if necessary in place of another untrusted one. Returns none if
    /// there are no slots at all.
    #[must_use]
    pub fn enter(&self, address: IpAddr, limits: &Limits) -> Option<ConnectionSlot> {
        let network = Network::from(address);
        let mut table = self.0.lock();
        let decision = table.decide_entry(limits);
        if !table.apply(decision) {
            return None;
        }
        let id = table.number();
        let displaced = CancellationToken::new();
        let connection =
            Connection { network, client: None, in_flight: 0, idle_since: id, displaced: displaced.clone() };
        table.open.insert(id, connection);
        drop(table);
        Some(ConnectionSlot { gate: self.clone(), id, displaced, pool: OnceLock::new() })
    }

    /// Returns the number of open connections.
    #[must_use]
    pub fn open(&self) -> usize {
        self.0.lock().open.len()
    }
}

impl ConnectionSlot {
    /// Exchanges the slot for one of the client. A connection that has a client already keeps its slot.
    ///
    /// # Errors
    /// Fails if the client has its share, or if there are no slots left, and no connection gives way. The
    /// connection is untrusted then.
    pub fn claim(&self, client: &Client, limits: &Limits) -> Result<(), ShareExceeded> {
        let mut table = self.gate.0.lock();
        // A connection that was displaced is about to be closed.
        if table.open.get(&self.id).ok_or(ShareExceeded)?.client.is_some() {
            return Ok(());
        }
        let decision = table.decide_claim(client, limits);
        if !table.apply(decision) {
            return Err(ShareExceeded);
        }
        let now = table.number();
        if let Some(connection) = table.open.get_mut(&self.id) {
            (connection.client, connection.idle_since) = (Some(client.clone()), now);
        }
        drop(table);
        // Claims of one connection are ordered by the lock.
        let _ = self.pool.set(client.pool());
        Ok(())
    }

    /// Returns the kind of the slot, or none while the connection is untrusted. A displaced connection has
    /// its last kind.
    #[must_use]
    pub fn pool(&self) -> Option<Pool> {
        self.pool.get().copied()
    }

    /// Records that a request is in flight.
    pub fn begin(&self) {
        if let Some(connection) = self.gate.0.lock().open.get_mut(&self.id) {
            connection.in_flight = connection.in_flight.saturating_add(1);
        }
    }

    /// Records that a request is no longer in flight.
    pub fn end(&self) {
        let mut table = self.gate.0.lock();
        let now = table.number();
        if let Some(connection) = table.open.get_mut(&self.id) {
            connection.in_flight = connection.in_flight.saturating_sub(1);
            if connection.in_flight == 0 {
                connection.idle_since = now;
            }
        }
    }

    /// Completes when another connection takes the slot.
    pub async fn displaced(&self) {
        self.displaced.cancelled().await;
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.gate.0.lock().open.remove(&self.id);
    }
}

#[cfg(test)]
mod tests;
