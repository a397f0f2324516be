//! Lanes bound how much is sent to the runtime at once, each with a queue of its own.
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::adaptive::Adaptive;
use crate::policy::Lane;

/// Calls that may wait in one lane: 8 for each of 512 pods. One more is refused, not-dispatched.
pub const MAX_QUEUE: usize = 4096;
/// Pulls in flight from one registry.
const PULLS_PER_HOST: usize = 4;
/// Pulls in flight in all.
const PULLS: usize = 8;
/// Registry hosts remembered before idle ones are forgotten.
const MAX_HOSTS: usize = 64;

/// The lane's queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} calls are already waiting in lane {}", MAX_QUEUE, .0.name())]
pub struct Full(pub Lane);

/// First come, first served, with a limit that may change.
#[derive(Debug, Clone)]
struct Limiter(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    limit: usize,
    in_flight: usize,
    queue: VecDeque<oneshot::Sender<Permit>>,
}

/// One slot; dropping it lets the next in.
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
                // Its caller went away. Its drop must not come back for the lock held here.
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

    /// Slots taken and calls waiting.
    fn load(&self) -> (usize, usize) {
        let state = self.0.lock();
        (state.in_flight, state.queue.iter().filter(|w| !w.is_closed()).count())
    }

    /// Waits for a slot; None when too many wait already. Dropping the future gives up the place.
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

/// A call's place in flight; dropping it lets the next in.
#[derive(Debug)]
pub struct Slot {
    _permits: [Option<Permit>; 2],
    /// Calls in flight in the lane when this one got in, itself included.
    pub in_flight: usize,
    /// Whether others waited behind it then.
    pub waiting: bool,
}

/// All lanes.
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
            // Only sending counts here.
            Lane::Stop => 16,
            // CNI teardown and file removal: mostly waiting for the kernel.
            Lane::Remove => 8,
            // Inspection outruns relists: four times their slots and a queue of its own.
            Lane::Inspect => 16,
            Lane::List => 4,
            Lane::Pull => PULLS,
            Lane::ExecHook | Lane::ExecProbe | Lane::ExecUser => 16,
            Lane::Stats => 4,
            // Users ask for them; the disk is the pods'.
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
    /// Waits for a slot. Cancel-safe: dropping the future gives up the place.
    ///
    /// # Errors
    /// [`Full`] when too many wait already.
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

    /// Slots taken and calls waiting in a lane.
    #[must_use]
    pub fn load(&self, lane: Lane) -> (usize, usize) {
        let (in_flight, waiting) = self.lanes.get(&lane).map_or((0, 0), Limiter::load);
        let of_hosts: usize = match lane {
            Lane::Pull => self.hosts.lock().values().map(|l| l.load().1).sum(),
            _ => 0,
        };
        (in_flight, waiting.saturating_add(of_hosts))
    }

    /// Takes in the answer to a call of the adaptive lane; returns the limit then.
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
    fn pulls_are_bounded_per_registry_and_in_all() {
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
    fn a_waiter_that_went_away_loses_nobodys_turn() {
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
    fn a_granted_turn_nobody_takes_goes_to_the_next() {
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
    fn a_full_queue_refuses() {
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
    fn raising_the_limit_lets_waiters_in_and_lowering_it_takes_effect_as_slots_come_back() {
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
