//! Slots that clients share.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;

/// Limits of something that several clients share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Limit of all clients.
    pub all: usize,
    /// Limit of each client.
    pub each: usize,
}

impl Share {
    /// No limit.
    pub const UNLIMITED: Self = Self { all: usize::MAX, each: usize::MAX };
}

/// The limit that leaves no slot for a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReachedLimit {
    /// All clients together have their share.
    OfAll,
    /// The client has its share. It may not have reached the limit of all.
    OfClient,
}

/// Occupied slots by client.
#[derive(Debug)]
pub struct Slots<K>(Arc<Mutex<HashMap<K, usize>>>);

impl<K> Clone for Slots<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K> Default for Slots<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// A slot of a client. It is free when this is dropped.
#[derive(Debug)]
pub struct Slot<K: Eq + Hash> {
    slots: Slots<K>,
    client: K,
}

impl<K: Eq + Hash + Clone> Slots<K> {
    /// Takes a slot.
    ///
    /// # Errors
    /// The client or all clients have their share.
    pub fn enter(&self, client: K, share: Share) -> Result<Slot<K>, ReachedLimit> {
        let mut slots = self.0.lock();
        let own = slots.get(&client).copied().unwrap_or(0);
        if own >= share.each {
            return Err(ReachedLimit::OfClient);
        }
        if slots.values().sum::<usize>() >= share.all {
            return Err(ReachedLimit::OfAll);
        }
        slots.insert(client.clone(), own.saturating_add(1));
        drop(slots);
        Ok(Slot { slots: self.clone(), client })
    }

    /// Returns the number of occupied slots.
    #[must_use]
    pub fn occupied(&self) -> usize {
        self.0.lock().values().sum()
    }
}

impl<K: Eq + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        let mut slots = self.slots.0.lock();
        if let Some(own) = slots.get_mut(&self.client) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                slots.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slots_are_limited_in_total_and_per_client() {
        let share = Share { all: 3, each: 2 };
        let slots = Slots::default();
        let (first, _second) = (slots.enter(1, share).unwrap(), slots.enter(1, share).unwrap());
        assert_eq!(slots.enter(1, share).unwrap_err(), ReachedLimit::OfClient);
        let _third = slots.enter(2, share).unwrap();
        assert_eq!(slots.enter(3, share).unwrap_err(), ReachedLimit::OfAll);
        assert_eq!(slots.occupied(), 3);
        drop(first);
        assert!(slots.enter(3, share).is_ok());
        assert!(slots.enter(1, share).is_ok());
    }

    proptest! {
        #[test]
        fn each_slot_is_counted_once(actions in proptest::collection::vec((0u8..4, any::<bool>()), 0..200)) {
            let share = Share { all: 6, each: 3 };
            let slots = Slots::default();
            let mut held: Vec<(u8, Slot<u8>)> = Vec::new();
            for (client, enters) in actions {
                let count = |held: &[(u8, Slot<u8>)]| held.iter().filter(|(c, _)| *c == client).count();
                if enters {
                    let is_free = count(&held) < share.each && held.len() < share.all;
                    let slot = slots.enter(client, share);
                    prop_assert_eq!(slot.is_ok(), is_free);
                    held.extend(slot.ok().map(|slot| (client, slot)));
                } else if let Some(at) = held.iter().position(|(c, _)| *c == client) {
                    drop(held.remove(at));
                }
                prop_assert_eq!(slots.0.lock().values().sum::<usize>(), held.len());
                prop_assert_eq!(slots.0.lock().get(&client).copied().unwrap_or(0), count(&held));
            }
        }
    }
}
