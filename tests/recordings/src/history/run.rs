//! Carries out scenarios.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::Method;
use parking_lot::Mutex;
use quintlet_csi_driver::fault;
use quintlet_csi_driver::thread::DriverThread;
use quintlet_kit::clock::Clock;
use serde_json::{Value, json};

use super::normal;
use super::observe::{Observer, Seen};
use super::scenario::{Binding, DriverState, Entry, Scenario, Step, Until, driver};
use crate::cluster::{Cluster, path_of, path_to};
use crate::facts::Names;
use crate::runtime::NODE;

/// Longest wait of a step: longer than a kubelet's wait for volumes and a back-off after it.
const LONG: Duration = Duration::from_secs(240);

/// Interval between checks.
const STEP: Duration = Duration::from_millis(10);

/// Longest wait for the events of a pod that is gone.
const LATEST_EVENT: Duration = Duration::from_secs(60);

/// Time without news after which a history is complete.
const QUIET: Duration = Duration::from_secs(2);

/// The node agent whose histories are recorded, and its API server.
#[derive(Debug)]
pub struct Node {
    pub cluster: Cluster,
    pub observer: Observer,
    /// Root directory of the agent.
    pub root: PathBuf,
    /// Directory for the directories `<host>` of scenarios.
    pub hosts: PathBuf,
    /// Directory for the state of drivers.
    pub drivers: PathBuf,
    /// The program of csi-node-driver-registrar. Without one, drivers register by themselves.
    pub registrar: Option<PathBuf>,
    /// Values that differ between runs.
    pub names: Names,
}

impl Node {
    /// Carries out a scenario and returns the facts of its history. Waits for `events` events of the pod, which an agent may send
    /// long after they occurred: it limits their rate.
    ///
    /// # Errors
    /// Fails if a step cannot be executed or waits too long.
    pub async fn run(&self, scenario: &Scenario, events: usize) -> anyhow::Result<Value> {
        let part = Part {
            node: self,
            name: &scenario.name,
            host: self.hosts.join(&scenario.name),
            state: self.drivers.join(&scenario.name),
            driver: Mutex::default(),
        };
        std::fs::create_dir_all(&part.host)?;
        std::fs::create_dir_all(&part.state)?;
        for (number, step) in scenario.steps.iter().enumerate() {
            let done = part.step(step).await;
            done.with_context(|| format!("{}, step {}", scenario.name, number.saturating_add(1)))?;
        }
        part.wait_quiet(events).await;
        let mut names = self.names.clone();
        names.insert(0, (part.host.display().to_string(), "<host>".to_owned()));
        names.push((driver(&scenario.name), "<driver>".to_owned()));
        Ok(self.observer.look(&scenario.name, |seen| normal::facts(scenario, seen, &names, &part.state)))
    }
}

/// A scenario that is carried out.
struct Part<'a> {
    node: &'a Node,
    name: &'a str,
    host: PathBuf,
    state: PathBuf,
    driver: Mutex<Option<Driver>>,
}

/// A running driver and its registrar, if any. Dropping it ends both as a crash does.
struct Driver {
    _thread: DriverThread,
    registrar: Option<Child>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(registrar) = &mut self.registrar {
            // Killing a process that has exited fails.
            let _ = registrar.kill();
            let _ = registrar.wait();
        }
    }
}

impl Part<'_> {
    async fn step(&self, step: &Step) -> anyhow::Result<()> {
        let cluster = &self.node.cluster;
        match step {
            Step::Create(object) => cluster.create(object).await.map(drop),
            Step::Until(until) => self.wait(until).await,
            Step::Bind(binding) => self.bind(binding).await,
            Step::Patch(change) => {
                cluster.merge(&path_to(&change.kind, &change.name)?, &change.patch).await.map(drop)
            }
            Step::Delete(target) => {
                let path = path_to(&target.kind, &target.name)?;
                Ok(cluster.call(Method::DELETE, &path, Some(&json!({}))).await.map(drop)?)
            }
            Step::Driver(state) => self.set_driver(*state),
            Step::Faults(rules) => Ok(fault::set_rules(&self.state, rules)?),
            Step::Host(entry) => Ok(make(&self.host, entry)?),
        }
    }

    fn set_driver(&self, state: DriverState) -> anyhow::Result<()> {
        // Of two drivers with the same sockets the first ends before the second starts.
        drop(self.driver.lock().take());
        if matches!(state, DriverState::Killed) {
            return Ok(());
        }
        let name = driver(self.name);
        let root = &self.node.root;
        let running = match &self.node.registrar {
            None => {
                let more = ["--name", &name, "--registration", &format!("{}.sock", self.name)];
                Driver { _thread: DriverThread::start(root, &self.state, &more), registrar: None }
            }
            Some(registrar) => {
                let socket = root.join("plugins").join(&name).join("csi.sock").display().to_string();
                let more = ["--name", &name, "--endpoint", &socket];
                // The registration of the driver itself is where no agent looks for it.
                let thread = DriverThread::start(&self.state.join("unused"), &self.state, &more);
                let child = Command::new(registrar)
                    .args(["--csi-address", &socket, "--kubelet-registration-path", &socket])
                    .arg("--plugin-registration-path")
                    .arg(root.join("plugins_registry"))
                    .stderr(std::fs::File::create(self.state.join("registrar.log"))?)
                    .spawn()?;
                Driver { _thread: thread, registrar: Some(child) }
            }
        };
        *self.driver.lock() = Some(running);
        Ok(())
    }

    async fn bind(&self, binding: &Binding) -> anyhow::Result<()> {
        let cluster = &self.node.cluster;
        let path = path_to("PersistentVolumeClaim", &binding.claim)?;
        let claim = cluster.get(&path).await?.context("no such claim")?;
        let mut spec = binding.spec.clone();
        spec["claimRef"] = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "default", "name": binding.claim,
            "uid": claim["metadata"]["uid"],
        });
        let volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {"name": binding.volume}, "spec": spec,
        });
        cluster.create(&volume).await?;
        cluster
            .merge(&format!("{}/status", path_of(&volume)?), &json!({"status": {"phase": "Bound"}}))
            .await?;
        let bound = json!({"status": {
            "phase": "Bound", "accessModes": spec["accessModes"], "capacity": spec["capacity"],
        }});
        cluster.merge(&format!("{path}/status"), &bound).await.map(drop)
    }

    async fn wait(&self, until: &Until) -> anyhow::Result<()> {
        let clock = Clock::system();
        let end = clock.boot() + LONG;
        loop {
            let holds = match until {
                Until::Registered => self.is_registered().await?,
                until => self.look(|seen| holds(until, seen)),
            };
            if holds {
                return Ok(());
            }
            if clock.boot() > end {
                let last = self.look(|seen| format!("{} {:#?}", seen.pod()["status"], seen.events.last()));
                bail!("{until:?} does not hold: {last}");
            }
            tokio::time::sleep(STEP).await;
        }
    }

    async fn is_registered(&self) -> anyhow::Result<bool> {
        let object = self.node.cluster.get(&path_to("CSINode", NODE)?).await?.unwrap_or_default();
        let drivers = object["spec"]["drivers"].as_array();
        Ok(drivers.is_some_and(|all| all.iter().any(|known| known["name"] == *driver(self.name))))
    }

    fn look<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        self.node.observer.look(self.name, look)
    }

    async fn wait_quiet(&self, events: usize) {
        let clock = Clock::system();
        let end = clock.boot() + LATEST_EVENT;
        let size = || {
            let (pods, versions) = self.look(|seen| (seen.pods.len(), seen.events.len()));
            (pods, versions, fault::calls(&self.state).len())
        };
        let has_all = || self.look(normal::event_count) >= events;
        let mut before = size();
        loop {
            tokio::time::sleep(QUIET).await;
            let now = size();
            // The comparison names the missing events.
            if now == before && (has_all() || clock.boot() > end) {
                return;
            }
            before = now;
        }
    }
}

/// Returns whether a condition holds that does not depend on other objects.
fn holds(until: &Until, seen: &Seen) -> bool {
    let is = |kind: &str, status: &str| {
        let conditions = seen.pod()["status"]["conditions"].as_array();
        conditions.is_some_and(|all| all.iter().any(|c| c["type"] == kind && c["status"] == status))
    };
    match until {
        Until::Ready => is("Ready", "True"),
        Until::Gone => !seen.pods.is_empty() && seen.pod().is_null(),
        Until::ReadyToStartContainers(status) => is("PodReadyToStartContainers", status),
        Until::Waiting(reason) => {
            seen.pod()["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == **reason
        }
        Until::Registered => false,
        Until::Event(sign) => seen.events.iter().any(|event| {
            event["reason"] == *sign.reason
                && event["message"].as_str().is_some_and(|text| text.contains(&sign.message))
                && event["count"].as_i64().unwrap_or(1) >= sign.count
        }),
    }
}

fn make(host: &Path, entry: &Entry) -> std::io::Result<()> {
    match entry {
        Entry::File(name) => std::fs::write(host.join(name), ""),
        Entry::Directory(name) => std::fs::create_dir_all(host.join(name)),
        Entry::Link(name, target) => std::os::unix::fs::symlink(target, host.join(name)),
    }
}
