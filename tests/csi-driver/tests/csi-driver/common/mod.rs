//! A root directory, the driver's process, and the manager and mounter of a node agent.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pod_sync_csi::drivers::Drivers;
use pod_sync_csi::mount::{Mounter, Publish, Stage};
use pod_sync_csi::paths::Root;
use pod_sync_csi::volume::{AccessMode, Secrets, Volume};
use pod_sync_csi::volume_data::LifecycleMode;
use pod_sync_plugins::{PluginHandler, PluginManager, PluginState};
use quintlet_csi_driver::process::DriverProcess;
use quintlet_csi_driver::volumes;
use tokio_util::sync::CancellationToken;

pub(crate) const DRIVER: &str = "test.csi.quintlet.dev";
pub(crate) const POD: &str = "7a1b0c9e-0000-4000-8000-000000000001";

/// Longest wait for a condition.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A node's root directory, unmounted and removed at the end.
pub(crate) struct Machine {
    temp: Arc<tempfile::TempDir>,
    pub(crate) root: PathBuf,
    pub(crate) state: PathBuf,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let temp = Arc::new(tempfile::tempdir().unwrap());
        let (root, state) = (temp.path().join("root"), temp.path().join("driver"));
        std::fs::create_dir_all(root.join("plugins_registry")).unwrap();
        std::fs::create_dir_all(&state).unwrap();
        Self { temp, root, state }
    }

    /// Returns another driver on the same node.
    pub(crate) fn beside(&self) -> Self {
        let state = self.temp.path().join("second-driver");
        std::fs::create_dir_all(&state).unwrap();
        Self { temp: Arc::clone(&self.temp), root: self.root.clone(), state }
    }

    pub(crate) fn driver(&self, more: &[&str]) -> DriverProcess {
        DriverProcess::start(Path::new(env!("CARGO_BIN_EXE_csi-driver")), &self.root, &self.state, more)
            .unwrap()
    }

    pub(crate) fn mounts(&self) -> Vec<PathBuf> {
        volumes::mounts_below(&self.root).unwrap()
    }

    /// Returns the files and directories below a directory of the root.
    pub(crate) fn tree(&self, dir: &str) -> Vec<String> {
        let mut found = Vec::new();
        let mut todo = vec![self.root.join(dir)];
        while let Some(dir) = todo.pop() {
            for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
                let path = entry.path();
                found.push(path.strip_prefix(&self.root).unwrap().display().to_string());
                if entry.file_type().unwrap().is_dir() {
                    todo.push(path);
                }
            }
        }
        found.sort();
        found
    }

    /// Starts the part of a node agent that uses drivers.
    pub(crate) fn agent(&self) -> Agent {
        let stop = CancellationToken::new();
        let drivers = Arc::new(Drivers::default());
        let handlers =
            HashMap::from([("CSIPlugin".to_owned(), Arc::clone(&drivers) as Arc<dyn PluginHandler>)]);
        let manager = PluginManager::start(self.root.join("plugins_registry"), handlers, stop.clone());
        let mounter = Mounter::new(Root::new(&self.root), "node-1".to_owned(), Arc::clone(&drivers));
        Agent { mounter: mounter.with_limit(Duration::from_secs(20)), drivers, manager: Some(manager), stop }
    }

    pub(crate) fn global_mount(&self) -> PathBuf {
        Root::new(&self.root).global_mount(DRIVER, "vol-1").unwrap()
    }

    pub(crate) fn mount(&self) -> PathBuf {
        Root::new(&self.root).mount(POD, "pv-1").unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for mount in volumes::mounts_below(self.temp.path()).unwrap_or_default().iter().rev() {
            let _ = volumes::unmount(mount);
        }
    }
}

pub(crate) struct Agent {
    pub(crate) mounter: Mounter,
    pub(crate) drivers: Arc<Drivers>,
    manager: Option<PluginManager>,
    stop: CancellationToken,
}

impl Agent {
    /// Waits until the driver is registered.
    pub(crate) async fn registered(&self) {
        self.state_of("reg.sock", |state| matches!(state, Some(PluginState::Registered(_)))).await;
    }

    /// Waits until the state of a registration socket is as expected, and returns it.
    pub(crate) async fn state_of(
        &self,
        socket: &str,
        expected: impl Fn(Option<&PluginState>) -> bool,
    ) -> Option<PluginState> {
        let mut states = self.manager.as_ref().unwrap().states();
        let plugin = |all: &BTreeMap<PathBuf, PluginState>| {
            all.iter().find(|(path, _)| path.ends_with(socket)).map(|(_, state)| state.clone())
        };
        let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
        loop {
            let state = plugin(&states.borrow_and_update());
            if expected(state.as_ref()) {
                return state;
            }
            let changed = tokio::time::timeout_at(deadline, states.changed()).await;
            changed.unwrap_or_else(|_| panic!("the state of {socket} stays {state:?}")).unwrap();
        }
    }

    /// Returns a mounter for an operation in which the driver hangs. The driver gets the call before the
    /// limit on a busy machine, too.
    pub(crate) fn impatient(&self) -> Mounter {
        self.mounter.clone().with_limit(Duration::from_secs(2))
    }

    /// Ends the agent as a crash does: nothing is deregistered or unmounted.
    pub(crate) fn crash(self) {}
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub(crate) fn volume() -> Volume {
    Volume {
        driver: DRIVER.to_owned(),
        handle: "vol-1".to_owned(),
        name: "pv-1".to_owned(),
        lifecycle: LifecycleMode::Persistent,
        fs_type: "ext4".to_owned(),
        access_modes: vec![AccessMode::ReadWriteOnce],
        read_only: false,
        mount_options: Vec::new(),
        attributes: BTreeMap::new(),
        migrated: false,
    }
}

pub(crate) fn stage() -> Stage {
    Stage {
        volume: volume(),
        publish_context: BTreeMap::new(),
        secrets: Secrets::default(),
        fs_group: None,
        selinux_label: None,
    }
}

pub(crate) fn publish() -> Publish {
    Publish {
        volume: volume(),
        pod: POD.to_owned(),
        publish_context: BTreeMap::new(),
        secrets: Secrets::default(),
        fs_group: None,
        selinux_label: None,
        mounted_before: false,
        refusal: None,
    }
}

/// Waits until a condition holds.
pub(crate) async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "{what} does not happen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
