//! Writes the limits of `kubepods` and of the cgroups of reservations, at the start and once a minute
//! (`pkg/kubelet/cm: enforceNodeAllocatableCgroups`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pod_sync_clients::{EventType, Events};
use pod_sync_decisions::qos::PodCgroup;
use pod_sync_layout::RuntimeState;
use quintlet_cgroups::{CgroupError, Cgroups, KubepodsLimits};
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::reservations::EnforcedReservation;
use crate::resources::online_cpus;

/// Interval of writes. Another process, such as systemd when it reloads its units, may have changed the
/// limits.
const PERIOD: Duration = Duration::from_secs(60);

const ENFORCED: &str = "NodeAllocatableEnforced";
const NOT_ENFORCED: &str = "FailedNodeAllocatableEnforcement";

/// The cgroup of a reservation cannot be limited.
#[derive(Debug, thiserror::Error)]
#[error("{failure} {cgroup:?}")]
pub struct EnforcementError {
    failure: &'static str,
    cgroup: String,
    source: Box<CgroupError>,
}

/// The cgroups of the node and their limits. Clones are the same cgroups.
#[derive(Debug, Clone)]
pub struct NodeCgroups {
    cgroups: Cgroups,
    limits: KubepodsLimits,
    reservations: Vec<EnforcedReservation>,
    events: Events,
    node: String,
    // The last write of the limits of kubepods succeeded.
    is_limited: Arc<AtomicBool>,
}

impl NodeCgroups {
    /// Returns the cgroups of the node `node`. Nothing is written yet.
    #[must_use]
    pub fn new(
        cgroups: Cgroups,
        limits: KubepodsLimits,
        reservations: Vec<EnforcedReservation>,
        events: Events,
        node: String,
    ) -> Self {
        Self { cgroups, limits, reservations, events, node, is_limited: Arc::default() }
    }

    pub(crate) fn cgroups(&self) -> &Cgroups {
        &self.cgroups
    }

    /// Creates `kubepods` and the QoS cgroups, and writes all limits. The cgroup driver must be known.
    ///
    /// # Errors
    /// The cgroup of a reservation cannot be limited. If kubepods cannot, an event says so, and
    /// [`NodeCgroups::keep`] tries again.
    pub(crate) async fn set_up(&self) -> Result<(), EnforcementError> {
        self.limit_kubepods().await;
        self.limit_reservations().await?;
        for reservation in &self.reservations {
            let message = format!("{} {}", reservation.success, reservation.cgroup);
            self.event(EventType::Normal, ENFORCED, &message);
        }
        Ok(())
    }

    /// Writes all limits again once a minute, from the first Status of the runtime until `stop`.
    pub async fn keep(self, mut state: watch::Receiver<RuntimeState>, stop: CancellationToken) {
        // Dropping the wait ends the loop.
        let known = tokio::select! {
            () = stop.cancelled() => return,
            known = state.wait_for(RuntimeState::is_known) => known.map(drop),
        };
        if known.is_err() {
            return;
        }
        loop {
            // Both arms only wait.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(PERIOD) => {}
            }
            self.limit_kubepods().await;
            if let Err(error) = self.limit_reservations().await {
                let error = quintlet_kit::error_chain(&error);
                tracing::warn!(error, "limits of a reserved cgroup not written, retrying");
                self.event(EventType::Warning, NOT_ENFORCED, &error);
            }
        }
    }

    async fn limit_kubepods(&self) {
        let (cgroups, limits) = (self.cgroups.clone(), self.limits);
        let write = move || cgroups.set_up_kubepods(limits, &online_cpus());
        let written = contained_request(None, task::blocking(write)).await;
        // A panic has been logged.
        let Ok(written) = written else { return };
        let was_limited = self.is_limited.swap(written.is_ok(), Ordering::Relaxed);
        match written {
            // Without QoS cgroups there is nothing to enforce.
            Ok(()) if !was_limited && self.cgroups.has_qos_cgroups() => {
                self.event(EventType::Normal, ENFORCED, "Updated Node Allocatable limit across pods");
            }
            Ok(()) => {}
            Err(error) => {
                let error = quintlet_kit::error_chain(&error);
                // Each pod sets up its cgroups again and has an event if that fails.
                tracing::warn!(error, "limits of kubepods not written, retrying");
                let message = format!("Failed to update Node Allocatable Limits \"kubepods\": {error}");
                self.event(EventType::Warning, NOT_ENFORCED, &message);
            }
        }
    }

    async fn limit_reservations(&self) -> Result<(), EnforcementError> {
        if self.reservations.is_empty() {
            return Ok(());
        }
        let (cgroups, reservations) = (self.cgroups.clone(), self.reservations.clone());
        let write = move || {
            let cpus = online_cpus();
            reservations.into_iter().try_for_each(
                |EnforcedReservation { cgroup, limits, failure, .. }| {
                    let limits = PodCgroup { cpus: Some(cpus.clone()), ..limits };
                    let written = cgroups.limit_existing(&cgroup, &limits);
                    written.map_err(|source| EnforcementError { failure, cgroup, source: Box::new(source) })
                },
            )
        };
        contained_request(None, task::blocking(write)).await.unwrap_or(Ok(()))
    }

    fn event(&self, kind: EventType, reason: &str, message: &str) {
        self.events.node(&self.node, kind, reason, message);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use pod_sync_clients::UnsentEvents;
    use pod_sync_decisions::qos::CgroupSettings;
    use quintlet_kit::clock::Clock;

    use super::*;

    const CONTROLLERS: &str = "cpu cpuset memory pids\n";

    /// Makes a directory with the files of a cgroup v2.
    fn group(dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        for (file, text) in [
            ("cgroup.controllers", CONTROLLERS),
            ("cgroup.subtree_control", ""),
            ("cpu.weight", ""),
            ("cpuset.cpus", ""),
            ("memory.max", ""),
            ("pids.max", ""),
        ] {
            fs::write(dir.join(file), text).unwrap();
        }
    }

    struct Node {
        root: tempfile::TempDir,
        cgroups: NodeCgroups,
        stop: CancellationToken,
    }

    impl Node {
        fn new(reserved: &str) -> Self {
            let root = tempfile::tempdir().unwrap();
            for dir in ["", "kubepods", "kubepods/burstable", "kubepods/besteffort", "system"] {
                group(&root.path().join(dir));
            }
            let stop = CancellationToken::new();
            let reservation = EnforcedReservation {
                cgroup: reserved.to_owned(),
                limits: PodCgroup { memory_bytes: Some(64 << 20), ..PodCgroup::default() },
                failure: "Failed to enforce System Reserved Cgroup Limits on",
                success: "Updated limits on system reserved cgroup",
            };
            let limits =
                KubepodsLimits { cpu_milli: Some(1000), memory_bytes: Some(1 << 30), pids: Some(500) };
            let cgroups = Cgroups::new(root.path(), "/", CgroupSettings::default());
            let unsent = UnsentEvents::open(root.path().join("events"), "boot");
            let events = Events::new(root.path().join("no.sock"), unsent, Clock::system(), stop.clone());
            let cgroups = NodeCgroups::new(cgroups, limits, vec![reservation], events, "n1".to_owned());
            Self { root, cgroups, stop }
        }

        fn read(&self, file: &str) -> String {
            fs::read_to_string(self.root.path().join(file)).unwrap()
        }

        fn write(&self, file: &str, text: &str) {
            fs::write(self.root.path().join(file), text).unwrap();
        }

        fn limits(&self) -> [String; 4] {
            ["kubepods/cpu.weight", "kubepods/memory.max", "kubepods/pids.max", "system/memory.max"]
                .map(|file| self.read(file))
        }

        /// Starts the writes once a minute. The runtime has answered.
        fn keep(&self) -> watch::Sender<RuntimeState> {
            let (sender, state) = watch::channel(RuntimeState { name: "r".into(), ..Default::default() });
            let keep = self.cgroups.clone().keep(state, self.stop.clone());
            drop(task::spawn("keep-node-cgroups", keep));
            sender
        }
    }

    impl Drop for Node {
        fn drop(&mut self) {
            self.stop.cancel();
        }
    }

    /// Lets time pass until `is_true`. The clock is virtual: limits are written by a thread, which a paused
    /// clock does not wait for.
    async fn until(what: &str, is_true: impl Fn() -> bool) {
        for _ in 0..1000 {
            if is_true() {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        panic!("{what}");
    }

    #[tokio::test]
    async fn limits_that_someone_else_changes_are_written_again() {
        quintlet_virtual_time::start();
        let node = Node::new("/system");
        node.cgroups.set_up().await.unwrap();
        let want = ["39", "1073741824", "500", "67108864"];
        assert_eq!(node.limits(), want);
        let _state = node.keep();
        for file in ["kubepods/memory.max", "system/memory.max"] {
            node.write(file, "max");
        }
        until("the limits are written again", || node.limits() == want).await;
    }

    #[tokio::test]
    async fn pods_and_reservations_have_all_cpus_of_the_machine_and_qos_classes_no_own_ones() {
        let node = Node::new("/system");
        node.cgroups.set_up().await.unwrap();
        let all = online_cpus().to_string();
        let cpus = |group: &str| node.read(&format!("{group}/cpuset.cpus"));
        assert_eq!((cpus("kubepods"), cpus("system")), (all.clone(), all));
        assert_eq!((cpus("kubepods/burstable"), cpus("kubepods/besteffort")), (String::new(), String::new()));
    }

    #[tokio::test]
    async fn limits_that_cannot_be_written_are_written_later() {
        quintlet_virtual_time::start();
        let node = Node::new("/system");
        node.write("kubepods/cgroup.controllers", "cpu cpuset pids\n");
        node.cgroups.set_up().await.unwrap();
        assert_eq!(node.read("kubepods/memory.max"), "");
        let _state = node.keep();
        node.write("kubepods/cgroup.controllers", CONTROLLERS);
        until("the limit is written", || node.read("kubepods/memory.max") == "1073741824").await;
    }

    #[tokio::test]
    async fn a_reservation_whose_cgroup_is_missing_is_an_error() {
        let node = Node::new("/absent");
        let error = quintlet_kit::error_chain(&node.cgroups.set_up().await.unwrap_err());
        let want =
            "Failed to enforce System Reserved Cgroup Limits on \"/absent\": could not read controllers";
        assert!(error.starts_with(want), "{error}");
        assert!(!node.root.path().join("absent").exists(), "it is not created");
    }
}
