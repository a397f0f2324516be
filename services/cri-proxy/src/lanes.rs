//! Lanes: one queue and concurrency limit per kind of call to the runtime.
//!
//! A queue is first in, first out among calls of one [`Priority`]. Calls of critical pods precede others, and
//! the calls of a pod that is almost started precede those of a pod that has only begun, so that pods become
//! ready one after the other and not all at the end. A call is overtaken only [`MAX_OVERTAKEN`] times once it
//! is the first of its priority.
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::queue;
use tokio::sync::oneshot;

use crate::adaptive::Adaptive;
use crate::policy::Lane;

/// Maximum number of waiting calls per lane: 8 for each of 512 pods. Further calls are refused with the
/// outcome not-dispatched.
pub(crate) const MAX_QUEUE: usize = 4096;
/// Maximum number of concurrent pulls per registry.
const PULLS_PER_HOST: usize = 4;
/// Maximum number of concurrent pulls.
const PULLS: usize = 8;
/// Number of registry limiters from which idle ones are removed.
const MAX_HOSTS: usize = 64;

/// Number of later calls that may precede the first waiting call of a priority.
pub(crate) const MAX_OVERTAKEN: u32 = 64;

/// Order of waiting calls, most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// A static pod, or one of system priority.
    Critical,
    /// The last call before the container runs.
    StartContainer,
    /// CreateContainer, which a start of its container follows.
    CreateContainer,
    /// Any call that no container waits for.
    Other,
}

impl Priority {
    /// Returns the priority of a method. `is_critical` is set for calls of a pod of critical priority.
    #[must_use]
    pub fn of(method: &str, is_critical: bool) -> Self {
        match method {
            _ if is_critical => Self::Critical,
            "StartContainer" => Self::StartContainer,
            "CreateContainer" => Self::CreateContainer,
            _ => Self::Other,
        }
    }
}

/// The queue of the lane is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} calls are already waiting in lane {}", MAX_QUEUE, .0.name())]
pub struct Full(pub Lane);

/// A semaphore with a variable limit and a queue per priority.
#[derive(Debug, Clone)]
struct Limiter(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    limit: usize,
    in_flight: usize,
    queues: BTreeMap<Priority, VecDeque<Waiter>>,
    arrived: u64,
}

#[derive(Debug)]
struct Waiter {
    // Position among all waiting calls.
    arrived: u64,
    // Later calls that were admitted while this one was the first of its priority.
    overtaken: u32,
    grant: oneshot::Sender<Permit>,
}

impl State {
    fn waiting(&self) -> impl Iterator<Item = &Waiter> {
        self.queues.values().flatten()
    }

    fn queued(&self) -> usize {
        self.queues.values().fold(0, |all: usize, queue| all.saturating_add(queue.len()))
    }

    /// Takes the call that is next.
    fn next(&mut self) -> Option<Waiter> {
        let is_starved =
            |queue: &VecDeque<Waiter>| queue.front().is_some_and(|call| call.overtaken >= MAX_OVERTAKEN);
        let starved = self.queues.iter().find(|(_, queue)| is_starved(queue));
        let (priority, _) = starved.or_else(|| self.queues.iter().find(|(_, queue)| !queue.is_empty()))?;
        let priority = *priority;
        let next = self.queues.get_mut(&priority)?.pop_front()?;
        for first in self.queues.values_mut().filter_map(VecDeque::front_mut) {
            if first.arrived < next.arrived {
                first.overtaken = first.overtaken.saturating_add(1);
            }
        }
        Some(next)
    }
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
        Self(Arc::new(Mutex::new(State { limit, in_flight: 0, queues: BTreeMap::new(), arrived: 0 })))
    }

    fn admit(&self, state: &mut State) {
        while state.in_flight < state.limit {
            let Some(waiter) = state.next() else { return };
            state.in_flight = state.in_flight.saturating_add(1);
            if let Err(mut unwanted) = waiter.grant.send(Permit { limiter: Some(self.clone()) }) {
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
        (state.in_flight, state.waiting().filter(|call| !call.grant.is_closed()).count())
    }

    /// Waits for a slot. Returns none if the queue is full. Dropping the future leaves the queue.
    async fn enter(&self, priority: Priority) -> Option<Permit> {
        let turn = {
            let mut state = self.0.lock();
            if state.in_flight < state.limit && state.queued() == 0 {
                state.in_flight = state.in_flight.saturating_add(1);
                return Some(Permit { limiter: Some(self.clone()) });
            }
            if state.queued() >= MAX_QUEUE {
                for queue in state.queues.values_mut() {
                    queue.retain(|call| !call.grant.is_closed());
                }
                if state.queued() >= MAX_QUEUE {
                    return None;
                }
            }
            let (grant, turn) = oneshot::channel();
            state.arrived = state.arrived.saturating_add(1);
            let waiter = Waiter { arrived: state.arrived, overtaken: 0, grant };
            state.queues.entry(priority).or_default().push_back(waiter);
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

/// The concurrency limits of all lanes: a queue of calls each, ordered by [`Priority`].
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
            Lane::ExecHook | Lane::ExecProbe | Lane::ExecUser | Lane::RunUser => 16,
            Lane::Stats | Lane::StatsUser | Lane::ListUser => 4,
            // Checkpoints are requested by users and write to the disk that pods use.
            Lane::Checkpoint => 2,
        };
        let limiter = |lane: Lane| {
            let limiter = Limiter::new(limit(lane));
            let weak = Arc::downgrade(&limiter.0);
            queue::register(lane.queue(), MAX_QUEUE, move || Some(Limiter(weak.upgrade()?).load().1));
            (lane, limiter)
        };
        Self {
            lanes: Lane::ALL.into_iter().map(limiter).collect(),
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
    pub async fn enter(&self, lane: Lane, priority: Priority, registry: Option<&str>) -> Result<Slot, Full> {
        let full = || {
            queue::count_dropped(lane.queue());
            Full(lane)
        };
        let of_host = match registry.filter(|_| lane == Lane::Pull).map(|host| self.host(host)) {
            Some(limiter) => Some(limiter.enter(priority).await.ok_or_else(full)?),
            None => None,
        };
        let Some(limiter) = self.lanes.get(&lane) else { return Err(Full(lane)) };
        let permit = limiter.enter(priority).await.ok_or_else(full)?;
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
        let pull =
            |host| lanes.enter(Lane::Pull, Priority::Other, Some(host)).now_or_never().map(Result::unwrap);
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
        let first = limiter.enter(Priority::Other).now_or_never().flatten().unwrap();
        let mut gone = Box::pin(limiter.enter(Priority::Other));
        let mut next = Box::pin(limiter.enter(Priority::Other));
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
        let first = limiter.enter(Priority::Other).now_or_never().flatten().unwrap();
        let mut granted = Box::pin(limiter.enter(Priority::Other));
        assert!((&mut granted).now_or_never().is_none());
        drop(first);
        assert_eq!(limiter.load().0, 1);
        drop(granted);
        assert_eq!(limiter.load().0, 0);
    }

    #[test]
    fn a_full_queue_refuses_calls() {
        let limiter = Limiter::new(0);
        let mut waiting: Vec<_> = (0..MAX_QUEUE).map(|_| Box::pin(limiter.enter(Priority::Other))).collect();
        for waiter in &mut waiting {
            assert!(waiter.now_or_never().is_none());
        }
        assert!(matches!(limiter.enter(Priority::Other).now_or_never(), Some(None)));
        waiting.pop();
        assert!(limiter.enter(Priority::Other).now_or_never().is_none(), "a place came free");
    }

    /// Lets a limiter of one slot admit all these calls one after the other, and returns their positions in
    /// that order.
    fn order(calls: &[Priority]) -> Vec<usize> {
        let limiter = Limiter::new(1);
        let mut held = limiter.enter(Priority::Other).now_or_never().flatten();
        let mut waiting: Vec<_> = calls.iter().map(|call| Some(Box::pin(limiter.enter(*call)))).collect();
        for call in waiting.iter_mut().flatten() {
            assert!(call.now_or_never().is_none());
        }
        let mut order = Vec::new();
        while order.len() < calls.len() {
            drop(held.take());
            for (at, slot) in waiting.iter_mut().enumerate() {
                if let Some(permit) = slot.as_mut().and_then(|call| call.now_or_never()) {
                    (held, *slot) = (permit, None);
                    order.push(at);
                }
            }
            assert!(held.is_some(), "one call after the other: {order:?}");
        }
        order
    }

    #[test]
    fn critical_pods_precede_others_and_then_the_pods_that_are_nearest_to_ready() {
        use Priority::{CreateContainer, Critical, Other, StartContainer};
        let calls = [Other, CreateContainer, StartContainer, Other, StartContainer, Critical];
        assert_eq!(order(&calls), [5, 2, 4, 1, 0, 3]);
    }

    #[test]
    fn a_call_is_overtaken_a_limited_number_of_times() {
        let most = usize::try_from(MAX_OVERTAKEN).unwrap();
        let mut calls = vec![Priority::Other];
        calls.extend(std::iter::repeat_n(Priority::Critical, most * 2));
        assert_eq!(order(&calls).iter().position(|call| *call == 0), Some(most));
    }

    #[test]
    fn the_priority_of_a_call_is_that_of_its_pod_and_then_of_its_method() {
        for (method, is_critical, priority) in [
            ("RunPodSandbox", false, Priority::Other),
            ("CreateContainer", false, Priority::CreateContainer),
            ("StartContainer", false, Priority::StartContainer),
            ("RunPodSandbox", true, Priority::Critical),
            ("StartContainer", true, Priority::Critical),
        ] {
            assert_eq!(Priority::of(method, is_critical), priority, "{method} {is_critical}");
        }
    }

    #[test]
    fn raising_the_limit_admits_waiters_and_lowering_it_applies_as_slots_are_released() {
        let limiter = Limiter::new(1);
        let first = limiter.enter(Priority::Other).now_or_never().flatten().unwrap();
        let mut second = Box::pin(limiter.enter(Priority::Other));
        assert!((&mut second).now_or_never().is_none());
        limiter.set_limit(2);
        let second = second.now_or_never().flatten().unwrap();
        limiter.set_limit(1);
        drop(first);
        assert!(limiter.enter(Priority::Other).now_or_never().is_none());
        drop(second);
        assert!(limiter.enter(Priority::Other).now_or_never().is_some());
    }
}
