//! Checks invariants after every change of the runtime.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use quintlet_testkit::fake_runtime::{FakeRuntime, Method};

/// Methods that only read.
const READS: [Method; 11] = [
    Method::Version,
    Method::Status,
    Method::PodSandboxStatus,
    Method::ListPodSandbox,
    Method::ListContainers,
    Method::ContainerStatus,
    Method::ListImages,
    Method::ImageStatus,
    Method::ImageFsInfo,
    Method::GetContainerEvents,
    Method::Subscribe,
];

/// Violations so far.
#[derive(Debug, Clone, Default)]
pub struct Watch {
    seen: Arc<Mutex<BTreeSet<String>>>,
}

impl Watch {
    /// Checks for as long as it is polled.
    pub async fn run(self, runtime: FakeRuntime) {
        runtime
            .wait(|runtime| {
                self.seen.lock().extend(violations(runtime));
                false
            })
            .await;
    }

    /// Returns the violations so far.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.seen.lock().iter().cloned().collect()
    }
}

/// Returns the duplicates.
fn violations(runtime: &FakeRuntime) -> Vec<String> {
    let mut out = Vec::new();
    let (sandboxes, containers) = runtime.records();
    let mut ready: BTreeMap<&str, u32> = BTreeMap::new();
    for sandbox in sandboxes.iter().filter(|s| s.ready()) {
        *ready.entry(sandbox.pod_uid()).or_default() += 1;
    }
    out.extend(ready.iter().filter(|(_, n)| **n > 1).map(|(uid, n)| format!("{n} ready sandboxes of {uid}")));
    let mut running: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for container in containers.iter().filter(|c| c.running()) {
        *running.entry((container.pod_uid(), container.name())).or_default() += 1;
    }
    out.extend(
        running
            .iter()
            .filter(|(_, n)| **n > 1)
            .map(|((uid, name), n)| format!("{n} running containers {name} of {uid}")),
    );
    out
}

/// Returns the calls that change something about one of these subjects.
#[must_use]
pub fn actions_on(runtime: &FakeRuntime, subjects: &[String]) -> Vec<String> {
    runtime
        .calls()
        .iter()
        .filter(|c| !READS.contains(&c.method) && c.subjects.iter().any(|s| subjects.contains(s)))
        .map(|c| format!("{:?} {:?}", c.method, c.subjects))
        .collect()
}
