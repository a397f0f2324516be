//! Lanes: one queue and concurrency limit per kind of call to the runtime.
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::adaptive::Adaptive;
use crate::policy::Lane;

/// Maximum number of waiting calls per lane: 8 for each of 512 pods. Further calls are refused with the outcome not-dispatched.
pub const MAX_QUEUE: usize = 4096;
/// Maximum number of concurrent pulls per registry.
const PULLS_PER_HOST: usize = 4;
/// Maximum number of concurrent pulls.
const PULLS: usize = 8;
/// Number of registry limiters from which idle ones are removed.
const MAX_HOSTS: usize = 64;

/// The queue of the lane is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} calls are already waiting in lane {}", MAX_QUEUE, .0.name())]
pub struct Full(pub Lane);

/// A FIFO semaphore with a variable limit.
#[derive(Debug, Clone)]
struct Limiter(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    limit: usize,
    in_flight: usize,
    queue: VecDeque<oneshot::Sender<Permit>>,
}

/// A slot of the limiter, released when dropped.
#[derive(Debug)]
struct Permit {
    limiter: Option<Limiter>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(limiter) = self.limiter.take() {
            let mut state = limiter.0.lock();
            state.in_flight = state.in_flight.saturating_sub(1);
            limiter.admit(&mut state);
        }
    }
}

impl Limiter {
    fn new(limit: usize) -> Self {
        Self(Arc::new(Mutex::new(State { limit, in_flight: 0, queue: VecDeque::new() })))
    }

    fn admit(&self, state: &mut State) {
        while state.in_flight < state.limit {
            let Some(waiter) = state.queue.pop_front() else { return };
            state.in_flight = state.in_flight.saturating_add(1);
            if let Err(mut unwanted) = waiter.send(Permit { limiter: Some(self.clone()) }) {
                // The waiting call was cancelled. The permit must not take the lock again when it is dropped.
                unwanted.limiter = None;
                state.in_flight = state.in_flight.saturating_sub(1);
            }
        }
    }

    fn set_limit(&self, limit: usize) {
        let mut state = self.0.lock();
        state.limit = limit;
        self.admit(&mut state);
    }

    /// Returns the number of occupied slots and of waiting calls.
    fn load(&self) -> (usize, usize) {
        let state = self.0.lock();
        (state.in_flight, state.queue.iter().filter(|w| !w.is_closed()).count())
    }

    /// Waits for a slot. Returns none if the queue is full. Dropping the future leaves the queue.
    async fn enter(&self) -> Option<Permit> {
        let turn = {
            let mut state = self.0.lock();
            if state.in_flight < state.limit && state.queue.is_empty() {
                state.in_flight = state.in_flight.saturating_add(1);
                return Some(Permit { limiter: Some(self.clone()) });
            }
            if state.queue.len() >= MAX_QUEUE {
                state.queue.retain(|w| !w.is_closed());
                if state.queue.len() >= MAX_QUEUE {
                    return None;
                }
            }
            let (grant, turn) = oneshot::channel();
            state.queue.push_back(grant);
            turn
        };
        turn.await.ok()
    }
}

/// The slot of a call, released when dropped.
#[derive(Debug)]
pub struct Slot {
    _permits: [Option<Permit>; 2],
    /// Calls in flight in the lane when this one was admitted, including itself.
    pub in_flight: usize,
    /// Whether calls were waiting behind it then.
    pub waiting: bool,
}

#[derive(Debug)]
pub struct Lanes {
    lanes: HashMap<Lane, Limiter>,
    hosts: Mutex<HashMap<String, Limiter>>,
    adaptive: Mutex<Adaptive>,
}

impl Default for Lanes {
    fn default() -> Self {
        let limit = |lane| match lane {
            Lane::Start => crate::adaptive::START,
            // The slot is held only until the call was sent.
            Lane::Stop => 16,
            // CNI teardown and removal of files mostly wait for the kernel.
            Lane::Remove => 8,
            // Inspections are more urgent than relists, so they have more slots.
            Lane::Inspect => 16,
            Lane::List => 4,
            Lane::Pull => PULLS,
            Lane::ExecHook | Lane::ExecProbe | Lane::ExecUser => 16,
            Lane::Stats => 4,
            // Checkpoints are requested by users and write to the disk that pods use.
            Lane::Checkpoint => 2,
        };
        Self {
            lanes: Lane::ALL.into_iter().map(|lane| (lane, Limiter::new(limit(lane)))).collect(),
            hosts: Mutex::new(HashMap::new()),
            adaptive: Mutex::new(Adaptive::default()),
        }
    }
}

impl Lanes {
    /// Waits for a slot. Cancel-safe: dropping the future leaves the queue.
    ///
    /// # Errors
    /// Returns [`Full`] if too many calls wait.
    pub async fn enter(&self, lane: Lane, registry: Option<&str>) -> Result<Slot, Full> {
        let of_host = match registry.filter(|_| lane == Lane::Pull).map(|host| self.host(host)) {
            Some(limiter) => Some(limiter.enter().await.ok_or(Full(lane))?),
            None => None,
        };
        let Some(limiter) = self.lanes.get(&lane) else { return Err(Full(lane)) };
        let permit = limiter.enter().await.ok_or(Full(lane))?;
        let (in_flight, waiting) = limiter.load();
        Ok(Slot { _permits: [of_host, Some(permit)], in_flight, waiting: waiting > 0 })
    }

    /// Returns the number of occupied slots and of waiting calls.
    #[must_use]
    pub fn load(&self, lane: Lane) -> (usize, usize) {
        let (in_flight, waiting) = self.lanes.get(&lane).map_or((0, 0), Limiter::load);
        let of_hosts: usize = match lane {
            Lane::Pull => self.hosts.lock().values().map(|l| l.load().1).sum(),
            _ => 0,
        };
        (in_flight, waiting.saturating_add(of_hosts))
    }

    /// Records the reply to a call of the adaptive lane. Returns the new limit.
    pub fn answered(
        &self,
        method: &'static str,
        latency: Duration,
        in_flight: usize,
        waiting: bool,
    ) -> usize {
        let limit = self.adaptive.lock().answered(method, latency, in_flight, waiting);
        if let Some(limiter) = self.lanes.get(&Lane::Start) {
            limiter.set_limit(limit);
        }
        limit
    }

    fn host(&self, host: &str) -> Limiter {
        let mut hosts = self.hosts.lock();
        if hosts.len() >= MAX_HOSTS && !hosts.contains_key(host) {
            hosts.retain(|_, limiter| limiter.load() != (0, 0));
        }
        hosts.entry(host.to_owned()).or_insert_with(|| Limiter::new(PULLS_PER_HOST)).clone()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn pulls_are_limited_per_registry_and_in_total() {
        let lanes = Lanes::default();
        let pull = |host| lanes.enter(Lane::Pull, Some(host)).now_or_never().map(Result::unwrap);
        let mut held: Vec<_> = (0..4).map(|_| pull("a").expect("four from one host")).collect();
        assert!(pull("a").is_none(), "a fifth from one host waits");
        held.extend((0..4).map(|_| pull("b").expect("four more from another")));
        assert!(pull("c").is_none(), "a ninth in all waits");
        held.pop();
        assert!(pull("c").is_some());
    }

    #[test]
    fn a_cancelled_waiter_does_not_block_the_next_one() {
        let limiter = Limiter::new(1);
        let first = limiter.enter().now_or_never().flatten().unwrap();
        let mut gone = Box::pin(limiter.enter());
        let mut next = Box::pin(limiter.enter());
        assert!((&mut gone).now_or_never().is_none());
        assert!((&mut next).now_or_never().is_none());
        assert_eq!(limiter.load(), (1, 2));
        drop(gone);
        drop(first);
        assert!(next.now_or_never().flatten().is_some());
        assert_eq!(limiter.load(), (0, 0));
    }

    #[test]
    fn an_unclaimed_slot_is_released() {
        let limiter = Limiter::new(1);
        let first = limiter.enter().now_or_never().flatten().unwrap();
        let mut granted = Box::pin(limiter.enter());
        assert!((&mut granted).now_or_never().is_none());
        drop(first);
        assert_eq!(limiter.load().0, 1);
        drop(granted);
        assert_eq!(limiter.load().0, 0);
    }

    #[test]
    fn a_full_queue_refuses_calls() {
        let limiter = Limiter::new(0);
        let mut waiting: Vec<_> = (0..MAX_QUEUE).map(|_| Box::pin(limiter.enter())).collect();
        for waiter in &mut waiting {
            assert!(waiter.now_or_never().is_none());
        }
        assert!(matches!(limiter.enter().now_or_never(), Some(None)));
        waiting.pop();
        assert!(limiter.enter().now_or_never().is_none(), "a place came free");
    }

    #[test]
    fn raising_the_limit_admits_waiters_and_lowering_it_applies_as_slots_are_released() {
        let limiter = Limiter::new(1);
        let first = limiter.enter().now_or_never().flatten().unwrap();
        let mut second = Box::pin(limiter.enter());
        assert!((&mut second).now_or_never().is_none());
        limiter.set_limit(2);
        let second = second.now_or_never().flatten().unwrap();
        limiter.set_limit(1);
        drop(first);
        assert!(limiter.enter().now_or_never().is_none());
        drop(second);
        assert!(limiter.enter().now_or_never().is_some());
    }
}
