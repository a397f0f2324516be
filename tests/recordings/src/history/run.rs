//! Carries out scenarios.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use http::Method;
use nix::sys::stat::{Mode, SFlag, mknod};
use parking_lot::Mutex;
use quintlet_csi_driver::fault;
use quintlet_csi_driver::thread::DriverThread;
use quintlet_kit::clock::Clock;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::normal;
use super::observe::{NodeVolumes, Observer, Seen};
use super::scenario::{Binding, DriverState, HostEntry, Scenario, ScenarioStep, Until, driver};
use crate::cluster::{ATTACHMENTS, Cluster, path_of, path_to};
use crate::facts::Names;
use crate::registrar::{self, Registrar};
use crate::runtime::NODE;
use crate::waiting::until;

/// Longest wait of a step: longer than a kubelet's wait for volumes and a back-off after it.
const LONG: Duration = Duration::from_secs(240);

/// Size of a disk in bytes.
const DISK_SIZE: u64 = 16 << 20;

/// Interval between checks.
const STEP: Duration = Duration::from_millis(10);

/// Longest wait for the events of a pod that is gone.
const LATEST_EVENT: Duration = Duration::from_secs(60);

/// Time without news after which a history is complete.
const QUIET: Duration = Duration::from_secs(2);

/// The node agent whose histories are recorded, and its API server.
#[derive(Debug)]
pub struct RecordedNode {
    /// The API server with the objects of the scenarios.
    pub cluster: Cluster,
    /// Watches the Node, its pods and its events.
    pub observer: Observer,
    /// Root directory of the agent.
    pub root: PathBuf,
    /// Directory for the directories `<host>` of scenarios.
    pub hosts: PathBuf,
    /// Directory for the state of drivers.
    pub drivers: PathBuf,
    /// The program of csi-node-driver-registrar. Without one, drivers register by themselves.
    pub registrar: Option<PathBuf>,
    /// The volumes that the Node has as attached. Absent if an attach-detach controller runs.
    pub attached: Option<tokio::sync::Mutex<Vec<Value>>>,
    /// Values that differ between runs.
    pub names: Names,
}

impl RecordedNode {
    /// Carries out a scenario and returns the facts of its history. Waits for `events` events of the pod,
    /// which an agent may send long after they occurred: it limits their rate.
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
            disks: Mutex::default(),
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
        let volumes = self.observer.volumes();
        let facts = |seen: &Seen| normal::facts(scenario, seen, &volumes, &names, &part.state);
        Ok(self.observer.look(&scenario.name, facts))
    }
}

/// A scenario that is carried out.
struct Part<'a> {
    node: &'a RecordedNode,
    name: &'a str,
    host: PathBuf,
    state: PathBuf,
    driver: Mutex<Option<Driver>>,
    disks: Mutex<Vec<Disk>>,
}

/// A running driver and its registrar, if any. Dropping it ends both as a crash does.
struct Driver {
    _thread: DriverThread,
    _registrar: Option<Registrar>,
}

impl Part<'_> {
    async fn step(&self, step: &ScenarioStep) -> anyhow::Result<()> {
        let cluster = &self.node.cluster;
        match step {
            ScenarioStep::Create(object) => cluster.create(object).await.map(drop),
            ScenarioStep::Until(until) => self.wait(until).await,
            ScenarioStep::Bind(binding) => self.bind(binding).await,
            ScenarioStep::Patch(change) => {
                cluster.merge(&path_to(&change.kind, &change.name)?, &change.patch).await.map(drop)
            }
            ScenarioStep::Delete(target) => {
                let path = path_to(&target.kind, &target.name)?;
                Ok(cluster.call(Method::DELETE, &path, Some(&json!({}))).await.map(drop)?)
            }
            ScenarioStep::Driver(state) => self.set_driver(*state),
            ScenarioStep::Faults(rules) => Ok(fault::set_rules(&self.state, rules)?),
            ScenarioStep::Host(entry) => {
                self.disks.lock().extend(make(&self.host, entry)?);
                Ok(())
            }
            ScenarioStep::Attach(volume) => self.attach(volume).await,
            ScenarioStep::Detach(volume) => self.detach(volume).await,
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
                Driver { _thread: DriverThread::start(root, &self.state, &more), _registrar: None }
            }
            Some(registrar) => {
                let (thread, registrar) = registrar::start(registrar, root, &self.state, &name)?;
                Driver { _thread: thread, _registrar: Some(registrar) }
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
                Until::InUse => !self.volumes().in_use.is_empty(),
                Until::PodReady(name) => {
                    self.node.observer.look(name, |seen| has_condition(seen, "Ready", "True"))
                }
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

    /// Attaches a PersistentVolume: writes the status of its VolumeAttachment as the driver's attacher does,
    /// and the other objects if no controller does.
    async fn attach(&self, name: &str) -> anyhow::Result<()> {
        let cluster = &self.node.cluster;
        if let Some(attached) = &self.node.attached {
            let volume = cluster.get(&path_to("PersistentVolume", name)?).await?.context("no such volume")?;
            let csi = |key: &str| volume["spec"]["csi"][key].as_str().unwrap_or_default().to_owned();
            let (driver, handle) = (csi("driver"), csi("volumeHandle"));
            let object = json!({
                "apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment",
                "metadata": {"name": attachment_name(&handle, &driver)},
                "spec": {"attacher": driver, "nodeName": NODE, "source": {"persistentVolumeName": name}},
            });
            cluster.create(&object).await?;
            self.mark_attached(name).await?;
            let mut attached = attached.lock().await;
            attached.push(json!({"name": format!("kubernetes.io/csi/{driver}^{handle}"), "devicePath": ""}));
            return self.report_attached(&attached).await;
        }
        until("an attachment of the controller", async || {
            let exists = self.attachment(name).await?.is_some();
            Ok(if exists { Ok(()) } else { Err("none".to_owned()) })
        })
        .await?;
        self.mark_attached(name).await?;
        self.wait_attached(true).await
    }

    async fn detach(&self, name: &str) -> anyhow::Result<()> {
        until("a volume that is not in use", async || {
            let in_use = self.volumes().in_use;
            Ok(if in_use.is_empty() { Ok(()) } else { Err(json!(in_use).to_string()) })
        })
        .await?;
        let Some(attached) = &self.node.attached else {
            return self.wait_attached(false).await;
        };
        let mut attached = attached.lock().await;
        attached.retain(|volume| !is_of(volume, self.name));
        self.report_attached(&attached).await?;
        drop(attached);
        match self.attachment(name).await? {
            Some(path) => self.node.cluster.delete(&path).await,
            None => bail!("no attachment"),
        }
    }

    /// Returns the path of a volume's attachment, if it exists.
    async fn attachment(&self, volume: &str) -> anyhow::Result<Option<String>> {
        let list = self.node.cluster.get(ATTACHMENTS).await?.unwrap_or_default();
        let all = list["items"].as_array().cloned().unwrap_or_default();
        let own = all.iter().find(|object| object["spec"]["source"]["persistentVolumeName"] == *volume);
        let name = own.and_then(|object| object["metadata"]["name"].as_str());
        name.map(|name| path_to("VolumeAttachment", name)).transpose()
    }

    async fn mark_attached(&self, volume: &str) -> anyhow::Result<()> {
        let path = self.attachment(volume).await?.context("no attachment")?;
        let attached = json!({"status": {"attached": true}});
        self.node.cluster.merge(&format!("{path}/status"), &attached).await.map(drop)
    }

    /// Waits until the controller has reported the volume of the scenario as attached, or as detached.
    async fn wait_attached(&self, is_attached: bool) -> anyhow::Result<()> {
        until("the controller's report", async || {
            let attached = self.volumes().attached;
            Ok(if attached.is_empty() == is_attached { Err(json!(attached).to_string()) } else { Ok(()) })
        })
        .await
    }

    async fn report_attached(&self, attached: &[Value]) -> anyhow::Result<()> {
        let path = format!("{}/status", path_to("Node", NODE)?);
        let status = json!({"status": {"volumesAttached": attached}});
        self.node.cluster.merge(&path, &status).await.map(drop)
    }

    /// Returns the Node's volumes of the scenario's driver.
    fn volumes(&self) -> NodeVolumes {
        let mut volumes = self.node.observer.volumes().pop().unwrap_or_default();
        volumes.in_use.retain(|volume| is_of(volume, self.name));
        volumes.attached.retain(|volume| is_of(volume, self.name));
        volumes
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

fn has_condition(seen: &Seen, kind: &str, status: &str) -> bool {
    let conditions = seen.pod()["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|c| c["type"] == kind && c["status"] == status))
}

/// Returns whether a volume of the Node belongs to the driver of a scenario.
fn is_of(volume: &Value, scenario: &str) -> bool {
    volume.to_string().contains(&format!("/{}^", driver(scenario)))
}

/// Returns the name of the VolumeAttachment that the controller creates
/// (`pkg/volume/csi: getAttachmentName`).
fn attachment_name(handle: &str, driver: &str) -> String {
    format!("csi-{}", hex::encode(Sha256::digest(format!("{handle}{driver}{NODE}"))))
}

/// Returns whether a condition holds that does not depend on other objects.
fn holds(until: &Until, seen: &Seen) -> bool {
    match until {
        Until::Ready => has_condition(seen, "Ready", "True"),
        Until::Gone => !seen.pods.is_empty() && seen.pod().is_null(),
        Until::ReadyToStartContainers(status) => has_condition(seen, "PodReadyToStartContainers", status),
        Until::Waiting(reason) => {
            seen.pod()["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == **reason
        }
        Until::Registered | Until::InUse | Until::PodReady(_) => false,
        Until::Event(sign) => seen.events.iter().any(|event| {
            event["reason"] == *sign.reason
                && event["message"].as_str().is_some_and(|text| text.contains(&sign.message))
                && event["count"].as_i64().unwrap_or(1) >= sign.count
        }),
    }
}

/// A block device that a file backs. Dropping it detaches the file.
struct Disk(String);

impl Disk {
    /// Creates the device at `path`.
    fn make(path: &Path) -> anyhow::Result<Self> {
        let file = path.with_extension("image");
        std::fs::File::create(&file)?.set_len(DISK_SIZE)?;
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&file).output()?;
        ensure!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr));
        let disk = Self(String::from_utf8(output.stdout)?.trim().to_owned());
        let number = nix::sys::stat::stat(disk.0.as_str())?.st_rdev;
        mknod(path, SFlag::S_IFBLK, Mode::S_IRUSR | Mode::S_IWUSR, number)?;
        Ok(disk)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A device that is still in use shows as a difference of the history.
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// Creates an entry. Returns the device of a disk.
fn make(host: &Path, entry: &HostEntry) -> anyhow::Result<Option<Disk>> {
    match entry {
        HostEntry::File(name) => std::fs::write(host.join(name), "")?,
        HostEntry::Directory(name) => std::fs::create_dir_all(host.join(name))?,
        HostEntry::Link(name, target) => std::os::unix::fs::symlink(target, host.join(name))?,
        HostEntry::Disk(name) => return Disk::make(&host.join(name)).map(Some),
    }
    Ok(None)
}
