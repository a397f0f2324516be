//! State that the tasks share.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::Heartbeat;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_model::ids::PodUid;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;

use crate::mailbox::Mailbox;
use crate::metrics::{self, Metrics};
use crate::readers::Readers;
use crate::removed::RemovedIds;
use crate::store::{Store, TOMBSTONES};
use crate::traits::ContainerRuntime;

/// Concurrent inspections. The runtime answers a status in about a millisecond; further calls would queue
/// inside it.
pub(crate) const INSPECTIONS: usize = 16;
/// Concurrent inspections for a relist, so that hints and callers never wait for it.
pub(crate) const RELIST_INSPECTIONS: usize = 8;

/// The kubelet's default of `runtimeRequestTimeout`.
const CALL: Duration = Duration::from_secs(120);

/// The source of hints, and whether it delivers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HintState {
    pub(crate) source: &'static str,
    pub(crate) live: bool,
}

/// Results of full lists.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lists {
    /// Start of the last successful list.
    pub(crate) last: Option<Instant>,
    /// Error of the newest list.
    pub(crate) error: Option<String>,
}

/// Intervals and limits.
#[derive(Debug, Clone, Copy)]
pub struct Periods {
    /// Pause between full lists without live hints.
    pub relist: Duration,
    /// Pause between full lists with live hints.
    pub relist_live: Duration,
    /// Age of the last successful list at which the node becomes not ready.
    pub threshold: Duration,
    /// Interval of messages on an idle Watch.
    pub beat: Duration,
    /// Limit of an inspection, with the time in queues of cri-proxy.
    pub call: Duration,
    /// Pause between attempts to open the hint stream.
    pub reconnect: Duration,
}

impl Default for Periods {
    fn default() -> Self {
        Self {
            relist: Duration::from_secs(1),
            relist_live: Duration::from_secs(30),
            threshold: crate::health::THRESHOLD,
            beat: Duration::from_secs(5),
            call: CALL,
            reconnect: CONNECT_INTERVAL,
        }
    }
}

/// Inspections in progress, in the order of their starts.
#[derive(Debug, Default)]
struct UnderWay {
    last: u64,
    began: BTreeMap<u64, Instant>,
}

pub(crate) struct Core {
    pub(crate) runtime: Arc<dyn ContainerRuntime>,
    pub(crate) clock: Clock,
    pub(crate) periods: Periods,
    pub(crate) readers: Readers,
    pub(crate) store: Arc<Store>,
    pub(crate) metrics: Metrics,
    pub(crate) inspections: Semaphore,
    pub(crate) relist_inspections: Semaphore,
    pub(crate) hints: watch::Sender<HintState>,
    pub(crate) lists: Mutex<Lists>,
    /// Triggers a full list. A trigger during a list causes another list after it.
    pub(crate) relist_now: Notify,
    /// Notified when a full list has succeeded or failed.
    pub(crate) list_ended: Notify,
    /// Heartbeat of the relist loop.
    pub(crate) heartbeat: Heartbeat,
    /// The mailboxes of the pods that have an owner.
    pub(crate) mailboxes: Mutex<HashMap<PodUid, Arc<Mailbox>>>,
    /// Removals that an entry of an inspection in progress may contradict.
    pub(crate) removed: Mutex<RemovedIds>,
    under_way: Mutex<UnderWay>,
}

impl Core {
    pub(crate) fn new(runtime: Arc<dyn ContainerRuntime>, clock: Clock, periods: Periods) -> Arc<Self> {
        // CLOCK_BOOTTIME grows over the runs of one boot, and no reader keeps a cursor over a boot.
        let epoch = u64::try_from(clock.boot().as_nanos()).unwrap_or(u64::MAX).max(1);
        let readers = Readers::new(Store::new(epoch, TOMBSTONES), clock.clone(), periods.beat);
        metrics::count_at_scrapes(&readers.store);
        let heartbeat = Heartbeat::new(clock.clone());
        Arc::new(Self {
            runtime,
            clock,
            periods,
            store: Arc::clone(&readers.store),
            readers,
            metrics: Metrics::new(),
            inspections: Semaphore::new(INSPECTIONS),
            relist_inspections: Semaphore::new(RELIST_INSPECTIONS),
            hints: watch::Sender::new(HintState { source: "none", live: false }),
            lists: Mutex::default(),
            relist_now: Notify::new(),
            list_ended: Notify::new(),
            heartbeat,
            mailboxes: Mutex::default(),
            removed: Mutex::default(),
            under_way: Mutex::default(),
        })
    }

    /// Registers the start of an inspection. Returns its ticket, which is larger than those of earlier
    /// inspections.
    pub(crate) fn begins(&self) -> u64 {
        let mut under_way = self.under_way.lock();
        under_way.last = under_way.last.saturating_add(1);
        let ticket = under_way.last;
        under_way.began.insert(ticket, Instant::now());
        ticket
    }

    pub(crate) fn ends(&self, ticket: u64) {
        self.under_way.lock().began.remove(&ticket);
    }

    /// Returns the age of the oldest inspection in progress.
    pub(crate) fn oldest_inspection(&self) -> Option<Duration> {
        self.under_way.lock().began.first_key_value().map(|(_, began)| began.elapsed())
    }

    /// Removes the mailbox of an owner whose pod is gone. Returns false if a request has arrived meanwhile.
    pub(crate) fn retire(&self, uid: &PodUid, mailbox: &Mailbox) -> bool {
        let mut mailboxes = self.mailboxes.lock();
        let idle = {
            let work = mailbox.work.lock();
            !work.requested && work.expects.is_empty()
        };
        if idle {
            mailboxes.remove(uid);
        }
        idle
    }

    /// Returns the age of the last successful list.
    pub(crate) fn last_list_age(&self) -> Option<Duration> {
        self.lists.lock().last.map(|at| at.elapsed())
    }

    /// Returns the current pause between full lists.
    pub(crate) fn relist_period(&self) -> Duration {
        if self.hints.borrow().live { self.periods.relist_live } else { self.periods.relist }
    }
}
