//! What the runtime does wrong, and the record of what it was asked.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

/// Calls kept: a thousand pods listed and inspected some ten times.
const CALLS_KEPT: usize = 65_536;

macro_rules! methods {
    ($($name:ident),* $(,)?) => {
        /// A method of the CRI, or Subscribe of containerd's event service.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Method {
            $(
                #[allow(missing_docs, reason = "the names are the CRI's")]
                $name,
            )*
        }
    };
}
methods!(
    Version,
    RunPodSandbox,
    StopPodSandbox,
    RemovePodSandbox,
    PodSandboxStatus,
    ListPodSandbox,
    CreateContainer,
    StartContainer,
    StopContainer,
    RemoveContainer,
    ListContainers,
    ContainerStatus,
    UpdateContainerResources,
    UpdatePodSandboxResources,
    ReopenContainerLog,
    ExecSync,
    Exec,
    Attach,
    PortForward,
    ContainerStats,
    ListContainerStats,
    PodSandboxStats,
    ListPodSandboxStats,
    UpdateRuntimeConfig,
    Status,
    CheckpointContainer,
    GetContainerEvents,
    ListMetricDescriptors,
    ListPodSandboxMetrics,
    RuntimeConfig,
    ListImages,
    ImageStatus,
    PullImage,
    RemoveImage,
    ImageFsInfo,
    StreamPodSandboxes,
    StreamContainers,
    StreamContainerStats,
    StreamPodSandboxStats,
    StreamImages,
    Subscribe,
);

/// One call as it came in.
#[derive(Debug, Clone)]
pub struct Call {
    /// The method.
    pub method: Method,
    /// When it came in.
    pub at: Instant,
    /// Metadata of the request.
    pub metadata: MetadataMap,
    /// What it is about: ids, pod uid and name, image.
    pub subjects: Vec<String>,
    request: Bytes,
}

impl Call {
    /// The request as it came, with what the bindings do not know of.
    #[must_use]
    pub fn raw(&self) -> &Bytes {
        &self.request
    }

    /// The request.
    ///
    /// # Panics
    /// `T` is not the request type of the method.
    #[must_use]
    pub fn request<T: prost::Message + Default>(&self) -> T {
        T::decode(self.request.clone()).expect("the type asked for is the request type of the method")
    }
}

#[derive(Debug, Clone)]
enum Act {
    Nothing,
    Hang,
    Fail { status: Status, after: bool },
}

/// One thing that goes wrong. All rules that match a call apply: delays add up, the first failure is the answer.
#[derive(Debug, Clone)]
pub struct Rule {
    method: Option<Method>,
    subject: Option<String>,
    latency: Duration,
    act: Act,
    left: Option<u32>,
}

/// A rule in the script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleId(u64);

impl Rule {
    /// Of every call of `method`.
    #[must_use]
    pub fn on(method: Method) -> Self {
        Self { method: Some(method), ..Self::on_any() }
    }

    /// Of every call.
    #[must_use]
    pub fn on_any() -> Self {
        Self { method: None, subject: None, latency: Duration::ZERO, act: Act::Nothing, left: None }
    }

    /// Only where the call is about this id, pod uid, name or image.
    #[must_use]
    pub fn about(mut self, subject: &str) -> Self {
        self.subject = Some(subject.to_owned());
        self
    }

    /// Only for the next `times` calls.
    #[must_use]
    pub fn times(mut self, times: u32) -> Self {
        self.left = Some(times);
        self
    }

    /// Takes this long before anything happens.
    #[must_use]
    pub fn latency(mut self, latency: Duration) -> Self {
        self.latency = latency;
        self
    }

    /// Hangs until the rule is taken out, then goes on as without it.
    #[must_use]
    pub fn hang(mut self) -> Self {
        self.act = Act::Hang;
        self
    }

    /// Fails; nothing happens.
    #[must_use]
    pub fn fail(mut self, code: Code, text: &str) -> Self {
        self.act = Act::Fail { status: Status::new(code, text), after: false };
        self
    }

    /// What was asked happens, and yet the answer is this failure. Of a list stream, half the items come before it.
    #[must_use]
    pub fn fail_after(mut self, code: Code, text: &str) -> Self {
        self.act = Act::Fail { status: Status::new(code, text), after: true };
        self
    }

    fn matches(&self, method: Method, subjects: &[String]) -> bool {
        self.left != Some(0)
            && self.method.is_none_or(|m| m == method)
            && self.subject.as_ref().is_none_or(|s| subjects.contains(s))
    }
}

#[derive(Default)]
struct Recorder {
    calls: VecDeque<Call>,
    counts: HashMap<Method, u64>,
    in_flight: HashMap<Method, usize>,
}

#[derive(Default)]
pub(crate) struct Script {
    rules: Mutex<Vec<(RuleId, Rule)>>,
    next: AtomicU64,
    recorder: Mutex<Recorder>,
    /// Changes of the rules and of the counts.
    changed: watch::Sender<u64>,
}

impl Script {
    pub(crate) fn add(&self, rule: Rule) -> RuleId {
        let id = RuleId(self.next.fetch_add(1, Ordering::Relaxed));
        self.rules.lock().push((id, rule));
        id
    }

    pub(crate) fn remove(&self, id: RuleId) {
        self.rules.lock().retain(|(i, _)| *i != id);
        self.changed.send_modify(|n| *n += 1);
    }

    pub(crate) fn clear(&self) {
        self.rules.lock().clear();
        self.changed.send_modify(|n| *n += 1);
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.recorder.lock().calls.iter().cloned().collect()
    }

    pub(crate) fn counts(&self) -> HashMap<Method, u64> {
        self.recorder.lock().counts.clone()
    }

    pub(crate) fn in_flight(&self, method: Method) -> usize {
        self.recorder.lock().in_flight.get(&method).copied().unwrap_or(0)
    }

    pub(crate) fn forget(&self) {
        let mut recorder = self.recorder.lock();
        recorder.calls.clear();
        recorder.counts.clear();
    }

    pub(crate) async fn wait_count(&self, method: Method, count: u64) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if self.counts().get(&method).copied().unwrap_or(0) >= count || changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Records a call and finds the rules for it.
    pub(crate) fn enter(
        &self,
        method: Method,
        metadata: MetadataMap,
        subjects: Vec<String>,
        request: Bytes,
    ) -> Plan {
        let mut plan = Plan { latency: Duration::ZERO, hangs: Vec::new(), before: None, after: None };
        for (id, rule) in self.rules.lock().iter_mut() {
            if !rule.matches(method, &subjects) {
                continue;
            }
            if let Some(left) = &mut rule.left {
                *left -= 1;
            }
            plan.latency += rule.latency;
            match &rule.act {
                Act::Nothing => {}
                Act::Hang => plan.hangs.push(*id),
                Act::Fail { status, after: false } => {
                    plan.before.get_or_insert_with(|| status.clone());
                }
                Act::Fail { status, after: true } => {
                    plan.after.get_or_insert_with(|| status.clone());
                }
            }
        }
        let mut recorder = self.recorder.lock();
        if recorder.calls.len() == CALLS_KEPT {
            recorder.calls.pop_front();
        }
        recorder.calls.push_back(Call { method, at: Instant::now(), metadata, subjects, request });
        *recorder.counts.entry(method).or_default() += 1;
        *recorder.in_flight.entry(method).or_default() += 1;
        drop(recorder);
        self.changed.send_modify(|n| *n += 1);
        plan
    }

    pub(crate) fn leave(&self, method: Method) {
        if let Some(n) = self.recorder.lock().in_flight.get_mut(&method) {
            *n = n.saturating_sub(1);
        }
    }

    /// Waits out hangs and latency; the failure scripted before the effect.
    pub(crate) async fn pass(&self, plan: &mut Plan) -> Result<(), Status> {
        let mut changed = self.changed.subscribe();
        while self.rules.lock().iter().any(|(id, _)| plan.hangs.contains(id)) {
            if changed.changed().await.is_err() {
                break;
            }
        }
        if !plan.latency.is_zero() {
            tokio::time::sleep(plan.latency).await;
        }
        plan.before.take().map_or(Ok(()), Err)
    }
}

/// What the script has in store for one call.
pub(crate) struct Plan {
    latency: Duration,
    hangs: Vec<RuleId>,
    before: Option<Status>,
    pub(crate) after: Option<Status>,
}
