//! The requests that a runtime received for a pod, without values that differ between runs.
//!
//! - `order`: requests in their order, up to the end of the start.
//! - `sandboxes`, `containers`, `updates`: the requests, in that order.
//! - `pulls`, `execs`, `stops`: the requests, sorted, since their order and number depend on timing.
//!
//! IDs, addresses, times and directories are replaced by names (`<uid>`, `<root>`). A repeated sandbox
//! configuration is replaced by a name if it is equal. Environment variables and options of resolv.conf are
//! sorted: a kubelet adds the variables of services and of whole ConfigMaps, and merges options, in no order.

use std::collections::BTreeMap;

use quintlet_testkit::fake_runtime::{FakeRuntime, Method};
use regex::Regex;
use serde_json::{Map, Value, json};

use crate::{schema, wire};

/// Name of a repeated sandbox configuration.
const SAME_SANDBOX: &str = "<as in RunPodSandbox>";

/// Name of limits of 0 for all huge page sizes of the machine.
const NO_HUGE_PAGES: &str = "<none of each size>";

/// Values that differ between runs, with their names.
pub type Names = Vec<(String, String)>;

/// The instances of a pod in the runtime, recorded while they exist.
#[derive(Debug, Clone)]
pub struct Instances {
    uid: String,
    sandboxes: Vec<String>,
    /// Names by container ID.
    containers: BTreeMap<String, String>,
    names: Names,
}

impl Instances {
    /// Returns the current instances of a pod. `names` are those of the run.
    #[must_use]
    pub fn of(runtime: &FakeRuntime, uid: &str, names: &Names) -> Self {
        let sandboxes: Vec<String> =
            runtime.sandboxes().iter().filter(|s| s.pod_uid() == uid).map(|s| s.id().to_owned()).collect();
        let containers: BTreeMap<String, String> = runtime
            .containers()
            .iter()
            .filter(|c| c.pod_uid() == uid)
            .map(|c| {
                let attempt = c.config.metadata.as_ref().map_or(0, |m| m.attempt);
                (c.id().to_owned(), format!("{}#{attempt}", c.name()))
            })
            .collect();
        let mut all = names.clone();
        all.push((uid.to_owned(), "<uid>".to_owned()));
        all.extend(sandboxes.iter().enumerate().map(|(n, id)| (id.clone(), format!("<sandbox {n}>"))));
        all.extend(containers.iter().map(|(id, name)| (id.clone(), format!("<{name}>"))));
        all.extend(runtime.image_ids().into_iter().map(|(id, name)| (id, format!("<id of {name}>"))));
        Self { uid: uid.to_owned(), sandboxes, containers, names: all }
    }

    fn is_about(&self, method: Method, request: &Value) -> bool {
        let text = |pointer: &str| request.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        match method {
            Method::RunPodSandbox => text("/config/metadata/uid") == self.uid,
            Method::PullImage => text("/sandbox_config/metadata/uid") == self.uid,
            Method::CreateContainer | Method::StopPodSandbox => {
                self.sandboxes.iter().any(|id| id == text("/pod_sandbox_id"))
            }
            _ => self.containers.contains_key(text("/container_id")),
        }
    }

    /// Returns the facts.
    ///
    /// # Errors
    /// Fails if a request is malformed.
    pub fn facts(&self, runtime: &FakeRuntime) -> Result<Value, wire::NotAMessage> {
        let normal = Normal::new(&self.names);
        let mut lists: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
        let mut order = Vec::new();
        let mut sandbox_config = Value::Null;
        let mut stopped = false;
        for call in runtime.calls() {
            let Some(table) = schema::request(call.method) else { continue };
            let request = wire::decode(table, call.raw())?;
            if !self.is_about(call.method, &request) {
                continue;
            }
            let mut request = normal.value(request);
            if call.method == Method::RunPodSandbox {
                sandbox_config = request["config"].clone();
            } else if request.get("sandbox_config") == Some(&sandbox_config) {
                request["sandbox_config"] = json!(SAME_SANDBOX);
            }
            let (list, word) = match call.method {
                Method::RunPodSandbox => ("sandboxes", "RunPodSandbox".to_owned()),
                Method::PullImage => ("pulls", format!("PullImage {}", text(&request["image"]["image"]))),
                Method::CreateContainer => {
                    let meta = &request["config"]["metadata"];
                    ("containers", format!("CreateContainer {}", text(&meta["name"])))
                }
                Method::StartContainer => ("", format!("StartContainer {}", text(&request["container_id"]))),
                Method::UpdateContainerResources => {
                    ("updates", format!("UpdateContainerResources {}", text(&request["container_id"])))
                }
                Method::ExecSync => ("execs", String::new()),
                Method::StopContainer => {
                    stopped = true;
                    ("stops", String::new())
                }
                _ => {
                    stopped = true;
                    ("", String::new())
                }
            };
            if !list.is_empty() {
                lists.entry(list).or_default().push(request);
            }
            if !word.is_empty() && !stopped {
                order.push(json!(word));
            }
        }
        for list in ["pulls", "execs", "stops"] {
            if let Some(requests) = lists.get_mut(list) {
                requests.sort_by_cached_key(Value::to_string);
                requests.dedup();
            }
        }
        let mut facts: Map<String, Value> =
            lists.into_iter().map(|(name, list)| (name.to_owned(), Value::Array(list))).collect();
        facts.insert("order".to_owned(), Value::Array(order));
        Ok(Value::Object(facts))
    }
}

/// Returns whether huge pages are limited to 0 in each size of the machine.
fn is_none_of_each(limits: &Value) -> bool {
    limits.as_array().is_some_and(|l| !l.is_empty() && l.iter().all(|limit| limit.get("limit").is_none()))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Replaces values that differ between runs by their names.
struct Normal<'a> {
    names: &'a Names,
    patterns: Vec<(Regex, &'static str)>,
}

impl<'a> Normal<'a> {
    fn new(names: &'a Names) -> Self {
        let patterns = [
            (r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$", "<time>"),
            // Path of the termination message, with eight random digits.
            (r"/[0-9a-f]{8}$", "/<chance>"),
            (r"\b127\.88\.\d+\.\d+\b", "<pod-ip>"),
        ];
        let patterns =
            patterns.map(|(p, name)| (Regex::new(p).expect("the expression is right"), name)).to_vec();
        Self { names, patterns }
    }

    fn text(&self, text: &str) -> String {
        let mut out = text.to_owned();
        for (value, name) in self.names {
            out = out.replace(value, name);
        }
        for (pattern, name) in &self.patterns {
            out = pattern.replace_all(&out, *name).into_owned();
        }
        out
    }

    fn value(&self, value: Value) -> Value {
        match value {
            Value::String(s) => Value::String(self.text(&s)),
            Value::Array(list) => Value::Array(list.into_iter().map(|v| self.value(v)).collect()),
            Value::Object(map) => Value::Object(
                map.into_iter()
                    .map(|(key, v)| {
                        let mut v = self.value(v);
                        // First host ID of a user namespace; 0 in the node's user namespace.
                        if key == "host_id" {
                            v = json!("<start>");
                        }
                        if key == "hugepage_limits" && is_none_of_each(&v) {
                            v = json!(NO_HUGE_PAGES);
                        }
                        if let Some(list) = v.as_array_mut() {
                            match key.as_str() {
                                "envs" => list.sort_by_key(|e| text(&e["key"]).to_owned()),
                                "options" => list.sort_by_key(|o| text(o).to_owned()),
                                _ => {}
                            }
                        }
                        (self.text(&key), v)
                    })
                    .collect(),
            ),
            other => other,
        }
    }
}
