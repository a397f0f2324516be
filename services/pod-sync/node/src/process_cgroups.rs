//! Keeps processes in the cgroups of `kubeletCgroups` and `systemCgroups` (`pkg/kubelet/cm: systemContainers`).

use std::time::Duration;

use quintlet_cgroups::{CgroupError, Cgroups, is_kernel_thread};
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use tokio_util::sync::CancellationToken;

/// Interval of moves, as in the kubelet.
const PERIOD: Duration = Duration::from_secs(60);

/// The cgroups of processes that are not those of pods.
#[derive(Debug, Clone)]
pub struct ProcessCgroups {
    cgroups: Cgroups,
    // Empty: processes stay where they are.
    own: String,
    system: String,
}

impl ProcessCgroups {
    /// Returns the cgroup `own` of this process (`kubeletCgroups`) and the cgroup `system` of the processes in the root cgroup
    /// (`systemCgroups`). `None` if both are empty.
    #[must_use]
    pub fn new(cgroups: &Cgroups, own: &str, system: &str) -> Option<Self> {
        let is_set = !own.is_empty() || !system.is_empty();
        is_set.then(|| Self { cgroups: cgroups.clone(), own: own.to_owned(), system: system.to_owned() })
    }

    /// Moves the processes once a minute, until `stop`.
    pub async fn keep(self, stop: CancellationToken) {
        loop {
            let this = self.clone();
            // A panic has been logged.
            let moved = contained_request(None, task::blocking(move || this.move_all())).await;
            if let Ok(Err(error)) = moved {
                let error = quintlet_kit::error_chain(&error);
                tracing::warn!(error, "processes not moved to their cgroup, retrying");
            }
            // Dropping the sleep ends the loop.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(PERIOD) => {}
            }
        }
    }

    fn move_all(&self) -> Result<(), CgroupError> {
        if !self.own.is_empty() {
            self.cgroups.move_process(&self.own, std::process::id())?;
        }
        if self.system.is_empty() {
            Ok(())
        } else {
            self.cgroups.move_root_processes(&self.system, is_kernel_thread)
        }
    }
}

#[cfg(test)]
mod tests {
    use pod_sync_decisions::qos::CgroupSettings;

    use super::*;

    #[test]
    fn this_process_and_those_of_the_root_cgroup_are_moved() {
        let root = tempfile::tempdir().unwrap();
        let files = |dir: &str, procs: &str| {
            let dir = root.path().join(dir);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("cgroup.controllers"), "cpu\n").unwrap();
            std::fs::write(dir.join("cgroup.procs"), procs).unwrap();
        };
        let read = |dir: &str| std::fs::read_to_string(root.path().join(dir).join("cgroup.procs")).unwrap();
        let own = std::process::id().to_string();
        files("", &format!("1\n{own}\n"));
        files("kubelet", "");
        files("system", "");
        let cgroups = Cgroups::new(root.path(), "/", CgroupSettings::default());
        assert!(ProcessCgroups::new(&cgroups, "", "").is_none());
        ProcessCgroups::new(&cgroups, "/kubelet", "").unwrap().move_all().unwrap();
        assert_eq!((read("kubelet"), read("system")), (own.clone(), String::new()));
        ProcessCgroups::new(&cgroups, "", "/system").unwrap().move_all().unwrap();
        assert_eq!(read("system"), own);
    }
}
