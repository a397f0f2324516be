//! Reads scenarios, and reads and writes recorded histories.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use quintlet_csi_driver::fault::Rule;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::fixture::names;
use crate::runtime::NODE;

/// A scenario: its steps in order. Its pod has the scenario's name. Another pod, whose history is not
/// recorded, has a longer one.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Name of the scenario and its pod.
    pub name: String,
    /// Steps, each of which ends before the next begins.
    pub steps: Vec<ScenarioStep>,
}

impl Scenario {
    /// Returns whether a driver's fault lasts until a later step.
    #[must_use]
    pub fn has_endless_fault(&self) -> bool {
        let endless = |rules: &BTreeMap<String, Rule>| rules.values().any(|rule| rule.times.is_none());
        self.steps.iter().any(|step| matches!(step, ScenarioStep::Faults(rules) if endless(rules)))
    }
}

/// A step of a scenario.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ScenarioStep {
    /// Creates an object.
    #[serde(skip)]
    Create(Value),
    /// Waits for a condition.
    Until(Until),
    /// Creates a PersistentVolume for a claim and binds both to each other, like the controller.
    Bind(Binding),
    /// Replaces fields of an object.
    Patch(Change),
    /// Deletes an object.
    Delete(Target),
    /// Changes the scenario's CSI driver.
    Driver(DriverState),
    /// Replaces the faults of the driver, by method.
    Faults(BTreeMap<String, Rule>),
    /// Creates an entry in the directory `<host>` of the node.
    Host(HostEntry),
    /// Attaches the PersistentVolume of this name to the node, like the driver's attacher and the
    /// attach-detach controller.
    Attach(String),
    /// Waits until the node no longer has the PersistentVolume in use, and detaches it like the attach-detach
    /// controller.
    Detach(String),
}

/// A condition on the pod.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Until {
    /// The condition Ready is True.
    Ready,
    /// The pod was deleted from the API server.
    Gone,
    /// Status of the pod's condition PodReadyToStartContainers, which the node reports with its first status.
    ReadyToStartContainers(String),
    /// Reason for which the container is waiting.
    Waiting(String),
    /// An event was recorded.
    Event(Sign),
    /// The node has registered the driver and written it to its CSINode.
    Registered,
    /// Another pod of the scenario is ready.
    PodReady(String),
    /// The Node has a volume of the driver in use.
    InUse,
}

/// An event of the pod.
#[derive(Debug, Clone, Deserialize)]
pub struct Sign {
    /// Reason of the event.
    pub reason: String,
    /// Part of the message.
    #[serde(default)]
    pub message: String,
    /// Least number of occurrences.
    #[serde(default = "once")]
    pub count: i64,
}

fn once() -> i64 {
    1
}

/// The binding of a PersistentVolumeClaim, which no controller makes here.
#[derive(Debug, Clone, Deserialize)]
pub struct Binding {
    /// Name of the claim.
    pub claim: String,
    /// Name of the PersistentVolume, which is the claim's `volumeName`.
    pub volume: String,
    /// Spec of the PersistentVolume, without `claimRef`.
    pub spec: Value,
}

/// An object of the API server.
#[derive(Debug, Clone, Deserialize)]
pub struct Target {
    /// Kind of the object.
    pub kind: String,
    /// Name of the object.
    pub name: String,
}

/// A change of an object of the API server.
#[derive(Debug, Clone, Deserialize)]
pub struct Change {
    /// Kind of the object.
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// The JSON merge patch.
    pub patch: Value,
}

/// The state of the CSI driver after a step.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DriverState {
    /// The driver serves and registers.
    Started,
    /// The driver has crashed: its sockets remain.
    Killed,
}

/// An entry of the host's file system, made before the pod.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HostEntry {
    /// A file, with its content.
    File(String),
    /// An empty directory, with its path.
    Directory(String),
    /// A link, with its target.
    Link(String, String),
    /// A block device.
    Disk(String),
}

/// Recorded history of a kubelet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct History {
    /// Version that the kubelet reports.
    pub kubelet: String,
    /// Statuses, events and calls; see [`crate::history::normal`].
    pub facts: Value,
}

fn dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("histories").join(name)
}

/// Returns all scenarios, by name. `<name>`, `<driver>` and `<host>` are replaced in their text; `<host>` by
/// a directory of the scenario below `hosts`.
///
/// # Errors
/// Fails if a scenario cannot be read.
pub fn scenarios(hosts: &Path) -> anyhow::Result<Vec<Scenario>> {
    names(&dir("specs"), ".yaml")?
        .into_iter()
        .map(|name| scenario(&name, hosts).with_context(|| name.clone()))
        .collect()
}

/// Returns the name of a scenario's driver.
#[must_use]
pub fn driver(name: &str) -> String {
    format!("{name}.csi.test")
}

fn scenario(name: &str, hosts: &Path) -> anyhow::Result<Scenario> {
    let text = std::fs::read_to_string(dir("specs").join(format!("{name}.yaml")))?;
    let text = text
        .replace("<name>", name)
        .replace("<driver>", &driver(name))
        .replace("<host>", &hosts.join(name).display().to_string());
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).map_err(|e| anyhow::anyhow!("{e}"))?;
    let steps = documents.into_iter().map(|document| step(name, document)).collect::<Result<_, _>>()?;
    Ok(Scenario { name: name.to_owned(), steps })
}

fn step(name: &str, mut document: Value) -> anyhow::Result<ScenarioStep> {
    if document["kind"] == "Step" {
        document.as_object_mut().map(|fields| fields.remove("kind"));
        return serde_json::from_value(document.clone()).with_context(|| document.to_string());
    }
    if document["kind"] == "Pod" {
        let other = document["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let is_other = other.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'));
        ensure!(other.is_empty() || is_other, "the name of another pod begins with that of its scenario");
        document["apiVersion"] = json!("v1");
        if other.is_empty() {
            document["metadata"]["name"] = json!(name);
        }
        document["metadata"]["namespace"] = json!("default");
        let spec = &mut document["spec"];
        spec["nodeName"] = json!(NODE);
        spec["automountServiceAccountToken"] = json!(false);
        spec["enableServiceLinks"] = json!(false);
        spec["terminationGracePeriodSeconds"] = json!(2);
    }
    Ok(ScenarioStep::Create(document))
}

/// Returns all recorded histories, by name.
///
/// # Errors
/// Fails if one cannot be read.
pub fn histories() -> anyhow::Result<BTreeMap<String, History>> {
    names(&dir("fixtures"), ".json")?
        .into_iter()
        .map(|name| {
            let text = std::fs::read_to_string(dir("fixtures").join(format!("{name}.json")))?;
            let history = serde_json::from_str(&text).with_context(|| name.clone())?;
            Ok((name, history))
        })
        .collect()
}

/// Writes a recorded history.
///
/// # Errors
/// Fails if it cannot be written.
pub fn write(name: &str, history: &History) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(history)? + "\n";
    Ok(std::fs::write(dir("fixtures").join(format!("{name}.json")), text)?)
}
