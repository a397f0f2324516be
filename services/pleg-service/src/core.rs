//! What the tasks of this service share, and the owners' mailboxes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::Heartbeat;
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::runtime::{Cursor, SharedPodRuntime};
use quintlet_proto::common::v1::Trace;
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::owner;
use crate::readers::Readers;
use crate::seams::{ContainerRuntime, HintKind, ReadError};
use crate::store::{Store, TOMBSTONES};

/// Inspections at once. The runtime answers a status in about a millisecond; more would only queue inside it.
pub(crate) const INSPECTIONS: usize = 16;
/// Of these, at most so many for pods a relist named: hints and callers never wait for a relist's work.
pub(crate) const RELIST_INSPECTIONS: usize = 8;

/// The kubelet's default of `runtimeRequestTimeout`.
const CALL: Duration = Duration::from_secs(120);

/// How the hint stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HintState {
    pub(crate) source: &'static str,
    pub(crate) live: bool,
}

/// What the lists came to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lists {
    /// When the last that succeeded began.
    pub(crate) last: Option<Instant>,
    /// Why the newest failed.
    pub(crate) error: Option<String>,
}

/// How long things take and last.
#[derive(Debug, Clone, Copy)]
pub struct Periods {
    /// From the end of a full list to the next, without live hints.
    pub relist: Duration,
    /// The same with live hints.
    pub relist_live: Duration,
    /// Age of the last good list that makes the node not ready.
    pub threshold: Duration,
    /// A message on an idle Watch.
    pub beat: Duration,
    /// The longest inspection of a pod, queues of the proxy included.
    pub call: Duration,
    /// Between attempts to open the hint stream.
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
            reconnect: Duration::from_millis(100),
        }
    }
}

/// Answer to who waits for an inspection: the pod, or None where the runtime knows nothing of it, and the place.
pub(crate) type Answer = Result<(Option<SharedPodRuntime>, Cursor), ReadError>;

/// Why a pod is to be looked at.
#[derive(Debug, Default)]
pub(crate) struct Nomination {
    /// The pod's names, where known.
    pub(crate) pod: Option<PodRef>,
    /// Sandboxes known to be the pod's.
    pub(crate) sandboxes: Vec<String>,
    /// Containers known to be the pod's, with their sandboxes.
    pub(crate) containers: Vec<(String, String)>,
    /// Ids of which the kind is not known; one the entry lacks makes a list by label.
    pub(crate) ids: Vec<String>,
    /// List by label.
    pub(crate) list: bool,
    /// The ids are from a list: for a pod not known yet, they are all there are.
    pub(crate) complete: bool,
    /// CLOCK_BOOTTIME of the start of the list that contains the pod, where a list led to this.
    pub(crate) listed: Option<Duration>,
    /// A relist named it: nobody waits.
    pub(crate) by_relist: bool,
    /// Nobody waits, and what is expected is seen by another inspection most often.
    pub(crate) later: bool,
    /// A hint told of this.
    pub(crate) expect: Option<(String, HintKind)>,
    /// Who waits for an inspection that begins from now on.
    pub(crate) waiter: Option<oneshot::Sender<Answer>>,
    /// Trace of the cause.
    pub(crate) trace: Option<Trace>,
}

/// Nominations since the last inspection began.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) nominated: bool,
    /// Someone or a hint waits, not just a relist.
    pub(crate) urgent: bool,
    pub(crate) pod: Option<PodRef>,
    pub(crate) sandboxes: BTreeSet<String>,
    pub(crate) containers: HashMap<String, String>,
    pub(crate) ids: BTreeSet<String>,
    pub(crate) list: bool,
    pub(crate) complete: bool,
    pub(crate) listed: Option<Duration>,
    pub(crate) expects: Vec<(String, HintKind)>,
    pub(crate) waiters: Vec<oneshot::Sender<Answer>>,
    pub(crate) trace: Option<Trace>,
}

impl Work {
    fn add(&mut self, n: Nomination) {
        self.nominated |= !n.later;
        self.urgent |= !n.by_relist && !n.later;
        self.pod = n.pod.or(self.pod.take());
        self.sandboxes.extend(n.sandboxes);
        self.containers.extend(n.containers);
        self.ids.extend(n.ids);
        self.list |= n.list;
        self.complete |= n.complete;
        self.listed = self.listed.max(n.listed);
        self.expects.extend(n.expect);
        self.waiters.extend(n.waiter);
        // The first cause names the trace; the others share its inspection.
        self.trace = self.trace.take().or(n.trace);
    }
}

/// Where nominations of one pod wait for its owner.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    pub(crate) work: Mutex<Work>,
    pub(crate) wake: Notify,
}

/// Inspections by the order in which they began.
#[derive(Debug, Default)]
struct UnderWay {
    last: u64,
    began: BTreeMap<u64, Instant>,
}

/// Shared by all tasks.
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
    /// Asks for a full list at once. One that is asked for during a list runs after it.
    pub(crate) relist_now: Notify,
    /// Of the loop of full lists.
    pub(crate) heartbeat: Heartbeat,
    mailboxes: Mutex<HashMap<PodUid, Arc<Mailbox>>>,
    under_way: Mutex<UnderWay>,
}

impl Core {
    pub(crate) fn new(runtime: Arc<dyn ContainerRuntime>, clock: Clock, periods: Periods) -> Arc<Self> {
        // Later runs begin later in the same boot; nothing that holds a cursor outlives a boot.
        let epoch = u64::try_from(clock.boot().as_nanos()).unwrap_or(u64::MAX).max(1);
        let readers = Readers::new(Store::new(epoch, TOMBSTONES), clock.clone(), periods.beat);
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
            heartbeat,
            mailboxes: Mutex::default(),
            under_way: Mutex::default(),
        })
    }

    /// An inspection begins. Its ticket is larger than that of every inspection that began before it.
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

    /// Age of the oldest inspection that has not ended.
    pub(crate) fn oldest_inspection(&self) -> Option<Duration> {
        self.under_way.lock().began.first_key_value().map(|(_, began)| began.elapsed())
    }

    /// Puts a nomination in the pod's mailbox; a pod without an owner gets one.
    pub(crate) fn nominate(self: &Arc<Self>, uid: &PodUid, nomination: Nomination) {
        let mut mailboxes = self.mailboxes.lock();
        let mailbox = mailboxes.entry(uid.clone()).or_insert_with(|| {
            let mailbox = Arc::<Mailbox>::default();
            let owning = owner::keep_owning(Arc::clone(self), uid.clone(), Arc::clone(&mailbox));
            quintlet_kit::task::spawn("pod-owner", owning);
            mailbox
        });
        mailbox.work.lock().add(nomination);
        mailbox.wake.notify_one();
    }

    /// As [`Self::nominate`]; the receiver gets the answer of the first inspection that begins from now on.
    pub(crate) fn inspect(
        self: &Arc<Self>,
        uid: &PodUid,
        nomination: Nomination,
    ) -> oneshot::Receiver<Answer> {
        let (waiter, answer) = oneshot::channel();
        self.nominate(uid, Nomination { waiter: Some(waiter), ..nomination });
        answer
    }

    /// Lets an owner with nothing left to own end. False: something came for it meanwhile.
    pub(crate) fn retire(&self, uid: &PodUid, mailbox: &Mailbox) -> bool {
        let mut mailboxes = self.mailboxes.lock();
        let idle = {
            let work = mailbox.work.lock();
            !work.nominated && work.expects.is_empty()
        };
        if idle {
            mailboxes.remove(uid);
        }
        idle
    }

    /// Age of the last list that succeeded.
    pub(crate) fn last_list_age(&self) -> Option<Duration> {
        self.lists.lock().last.map(|at| at.elapsed())
    }

    /// Pause between full lists as things are.
    pub(crate) fn relist_period(&self) -> Duration {
        if self.hints.borrow().live { self.periods.relist_live } else { self.periods.relist }
    }
}
