//! The script of faults, and the record of calls.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

/// Number of recorded calls: enough to list and inspect a thousand pods ten times.
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

/// A recorded call.
#[derive(Debug, Clone)]
pub struct Call {
    /// The called method.
    pub method: Method,
    /// Time of its arrival.
    pub at: Instant,
    /// Metadata of the request.
    pub metadata: MetadataMap,
    /// Subjects of the call: IDs, pod UID and name, image.
    pub subjects: Vec<String>,
    request: Bytes,
}

impl Call {
    /// Returns the bytes of the request, including fields of a later CRI.
    #[must_use]
    pub fn raw(&self) -> &Bytes {
        &self.request
    }

    /// Decodes the request.
    ///
    /// # Panics
    /// Panics if `T` is not the request type of the method.
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

/// A fault. All rules that match a call apply: delays add up, and the first failure is returned.
#[derive(Debug, Clone)]
pub struct Rule {
    method: Option<Method>,
    subject: Option<String>,
    latency: Duration,
    answer_latency: Duration,
    act: Act,
    left: Option<u32>,
}

/// Identifies a rule in the script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleId(u64);

impl Rule {
    /// Creates a rule for every call of `method`.
    #[must_use]
    pub fn on(method: Method) -> Self {
        Self { method: Some(method), ..Self::on_any() }
    }

    /// Creates a rule for every call.
    #[must_use]
    pub fn on_any() -> Self {
        let (latency, answer_latency) = (Duration::ZERO, Duration::ZERO);
        Self { method: None, subject: None, latency, answer_latency, act: Act::Nothing, left: None }
    }

    /// Limits the rule to calls about this ID, pod UID, name or image.
    #[must_use]
    pub fn about(mut self, subject: &str) -> Self {
        self.subject = Some(subject.to_owned());
        self
    }

    /// Limits the rule to the next `times` calls.
    #[must_use]
    pub fn times(mut self, times: u32) -> Self {
        self.left = Some(times);
        self
    }

    /// Delays the call before its effect.
    #[must_use]
    pub fn latency(mut self, latency: Duration) -> Self {
        self.latency = latency;
        self
    }

    /// Delays the response after the effect of the call.
    #[must_use]
    pub fn answer_latency(mut self, latency: Duration) -> Self {
        self.answer_latency = latency;
        self
    }

    /// Makes the call hang until the rule is removed, and then continue without it.
    #[must_use]
    pub fn hang(mut self) -> Self {
        self.act = Act::Hang;
        self
    }

    /// Makes the call fail without an effect.
    #[must_use]
    pub fn fail(mut self, code: Code, text: &str) -> Self {
        self.act = Act::Fail { status: Status::new(code, text), after: false };
        self
    }

    /// Makes the call take effect and then fail. A list stream fails after half of the items.
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
    /// Notifies of changes of rules and counts.
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

    pub(crate) fn calls(&self, wanted: impl Fn(&Call) -> bool) -> Vec<Call> {
        self.recorder.lock().calls.iter().filter(|call| wanted(call)).cloned().collect()
    }

    pub(crate) fn count_calls(&self, wanted: impl Fn(&Call) -> bool) -> usize {
        self.recorder.lock().calls.iter().filter(|call| wanted(call)).count()
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

    /// Records a call and returns the matching rules.
    pub(crate) fn enter(
        &self,
        method: Method,
        metadata: MetadataMap,
        subjects: Vec<String>,
        request: Bytes,
    ) -> CallScript {
        let mut plan = CallScript::default();
        for (id, rule) in self.rules.lock().iter_mut() {
            if !rule.matches(method, &subjects) {
                continue;
            }
            if let Some(left) = &mut rule.left {
                *left -= 1;
            }
            plan.latency += rule.latency;
            plan.answer_latency += rule.answer_latency;
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

    /// Waits for hangs and latency. Returns the failure that the script has before the effect.
    pub(crate) async fn pass(&self, plan: &mut CallScript) -> Result<(), Status> {
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

/// The part of the script that applies to one call.
#[derive(Default)]
pub(crate) struct CallScript {
    latency: Duration,
    pub(crate) answer_latency: Duration,
    hangs: Vec<RuleId>,
    before: Option<Status>,
    pub(crate) after: Option<Status>,
}
