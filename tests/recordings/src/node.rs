//! The state that a kubelet leaves on a node while its pods run: pods in the API server, instances in the
//! runtime, directories, and cgroups.
//!
//! `node/pods.yaml` has the pods, `node/state.json` the recording (`src/bin/record-node.rs`). Values that
//! differ between machines have names ([`Names`]): `<root>`, `<logs>`, `<cgroup>`, `<node>`, `<node-ip>`,
//! `<image-id>`, and for each instance `<sandbox 0>`, `<container 0.0>` and `<ip 0>`.

mod files;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use prost::Message;
use quintlet_testkit::fake_runtime::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::facts::Names;
use crate::{schema, wire};

pub use files::{FileKind, FileState};

/// The image of all containers: its name is a part of their hashes.
pub const IMAGE: &str = "localhost/busybox:1";

/// The state of a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeState {
    /// Version that the kubelet reports.
    pub kubelet: String,
    /// The Node of the API server.
    pub node: Value,
    /// Objects that the pods refer to.
    pub objects: Vec<Value>,
    /// Pods of the API server, with their statuses.
    pub pods: Vec<Value>,
    /// Manifests of static pods.
    pub manifests: Vec<Value>,
    /// Instances of the runtime.
    pub sandboxes: Vec<SandboxState>,
    /// Cgroups of the pods and of their classes.
    pub cgroups: Vec<String>,
    /// Files, with directories before what is in them.
    pub files: Vec<FileState>,
}

/// A sandbox with its containers, in the order of their creation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SandboxState {
    /// The RunPodSandbox request.
    pub request: Value,
    /// The containers that are left in it.
    pub containers: Vec<ContainerState>,
    /// Whether it was stopped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
}

/// A container in any state.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerState {
    /// The CreateContainer request.
    pub request: Value,
    /// Exit code of a container that does not run any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
    /// Later UpdateContainerResources requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub updates: Vec<Value>,
}

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("node").join(name)
}

/// Returns the documents of `node/pods.yaml`.
///
/// # Errors
/// Fails if the file cannot be read.
pub fn documents() -> anyhow::Result<Vec<Value>> {
    let text = std::fs::read_to_string(path("pods.yaml"))?;
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    serde_saphyr::from_multiple_with_options(&text, options).context("node/pods.yaml")
}

impl NodeState {
    /// Reads the recording.
    ///
    /// # Errors
    /// Fails if it cannot be read.
    pub fn read() -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path("state.json"))?;
        serde_json::from_str(&text).context("node/state.json")
    }

    /// Writes the recording, with names in place of values.
    ///
    /// # Errors
    /// Fails if it cannot be written.
    pub fn write(&self, names: &Names) -> anyhow::Result<()> {
        let text = replaced(&serde_json::to_string_pretty(self)?, names.iter().map(|(v, n)| (v, n)));
        // A signed token of a service account, which is of use to nothing but that cluster.
        let token = regex::Regex::new(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")?;
        Ok(std::fs::write(path("state.json"), token.replace_all(&text, "<token>").into_owned() + "\n")?)
    }

    /// Returns the state of this machine: values in place of names.
    ///
    /// # Errors
    /// Fails if a value breaks the JSON.
    pub fn on(&self, names: &Names) -> anyhow::Result<Self> {
        let text = replaced(&serde_json::to_string(self)?, names.iter().map(|(v, n)| (n, v)));
        serde_json::from_str(&text).context("a name's value")
    }
}

fn replaced<'a>(text: &str, pairs: impl Iterator<Item = (&'a String, &'a String)>) -> String {
    pairs.fold(text.to_owned(), |text, (old, new)| text.replace(old, new))
}

/// Returns a recorded request as the bindings have it.
///
/// # Errors
/// Fails if the request has a field that the table does not have, or is of another method.
pub fn request<T: Message + Default>(method: Method, request: &Value) -> anyhow::Result<T> {
    let table = schema::request(method).context("a method without requests")?;
    Ok(T::decode(wire::encode(table, request)?.as_slice())?)
}

/// Returns a request of the runtime's recorder as JSON.
///
/// # Errors
/// Fails if the request is malformed, or the method is not one that changes something.
pub fn decoded(method: Method, raw: &[u8]) -> anyhow::Result<Value> {
    let table = schema::request(method).context("a method without requests")?;
    Ok(wire::decode(table, raw)?)
}
