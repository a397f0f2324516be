//! Specs and fixtures on disk.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::runtime::NODE;

/// A pod to be recorded, with what it refers to.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Its name, and the pod's.
    pub name: String,
    /// The pod; bound to the node unless it is a static one.
    pub pod: Value,
    /// What is created before it.
    pub objects: Vec<Value>,
    /// What happens once it has started.
    pub then: Option<Then>,
}

/// What happens to a pod that has started.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Then {
    /// The process of this container ends.
    Exit(String),
    /// This container is restarted for a reason of its own.
    Restarted(String),
    /// The pod is patched.
    #[serde(untagged)]
    Patch {
        /// Through this subresource.
        subresource: String,
        /// The patch; in a fixture, the spec that came of it.
        patch: Value,
    },
}

/// What a kubelet did for a pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fixture {
    /// What the kubelet calls itself.
    pub kubelet: String,
    /// What was created before the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<Value>,
    /// The pod as the API server gave it, or as its manifest has it.
    pub pod: Value,
    /// What happened once it had started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub then: Option<Then>,
    /// The requests; see [`crate::facts`].
    pub facts: Value,
}

/// Where specs are.
#[must_use]
pub fn specs_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("specs")
}

/// Where fixtures are.
#[must_use]
pub fn fixtures_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// A static pod comes from a manifest.
#[must_use]
pub fn is_static(name: &str) -> bool {
    name.starts_with("static-")
}

fn names(dir: &Path, extension: &str) -> std::io::Result<Vec<String>> {
    let mut out: Vec<String> = std::fs::read_dir(dir)?
        .filter_map(Result::ok)
        .filter_map(|e| Some(e.file_name().to_str()?.strip_suffix(extension)?.to_owned()))
        .collect();
    out.sort();
    Ok(out)
}

/// All specs, by name.
///
/// # Errors
/// One cannot be read, or has no pod in it.
pub fn specs() -> anyhow::Result<Vec<Spec>> {
    names(&specs_dir(), ".yaml")?.into_iter().map(|name| spec(&name)).collect()
}

fn spec(name: &str) -> anyhow::Result<Spec> {
    let text = std::fs::read_to_string(specs_dir().join(format!("{name}.yaml")))?;
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(&text, options)
        .map_err(|e| anyhow::anyhow!("{name}: {e}"))?;
    let (pods, others): (Vec<Value>, Vec<Value>) = documents.into_iter().partition(|d| d["kind"] == "Pod");
    let (thens, objects): (Vec<Value>, Vec<Value>) = others.into_iter().partition(|d| d["kind"] == "Then");
    let then = thens.into_iter().next().map(|mut then| {
        then.as_object_mut().map(|t| t.remove("kind"));
        serde_json::from_value(then)
    });
    let [mut pod] =
        <[Value; 1]>::try_from(pods).map_err(|pods| anyhow::anyhow!("{name}: {} pods", pods.len()))?;
    pod["apiVersion"] = json!("v1");
    pod["metadata"]["name"] = json!(name);
    pod["metadata"]["namespace"] = json!("default");
    if !is_static(name) {
        pod["spec"]["nodeName"] = json!(NODE);
    }
    Ok(Spec { name: name.to_owned(), pod, objects, then: then.transpose()? })
}

/// All fixtures, by name.
///
/// # Errors
/// One cannot be read.
pub fn fixtures() -> anyhow::Result<Vec<(String, Fixture)>> {
    names(&fixtures_dir(), ".json")?
        .into_iter()
        .map(|name| {
            let text = std::fs::read_to_string(fixtures_dir().join(format!("{name}.json")))?;
            let fixture = serde_json::from_str(&text).map_err(|e| anyhow::anyhow!("{name}: {e}"))?;
            Ok((name, fixture))
        })
        .collect()
}

/// Writes a fixture.
///
/// # Errors
/// It cannot be written.
pub fn write(name: &str, fixture: &Fixture) -> anyhow::Result<()> {
    // The name of the token's volume ends in five characters by chance.
    let volume = regex::Regex::new("kube-api-access-[a-z0-9]{5}")?;
    let text = serde_json::to_string_pretty(fixture)? + "\n";
    let text = volume.replace_all(&text, "kube-api-access-12345").into_owned();
    Ok(std::fs::write(fixtures_dir().join(format!("{name}.json")), text)?)
}

/// What the server adds to every object, and differs from run to run.
pub fn strip(object: &mut Value) {
    if let Some(map) = object.as_object_mut() {
        map.remove("status");
    }
    if let Some(meta) = object["metadata"].as_object_mut() {
        meta.retain(|key, _| {
            !["uid", "resourceVersion", "creationTimestamp", "managedFields", "generation"]
                .contains(&key.as_str())
        });
    }
}
