//! Builds one pod per field and extreme value.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use quintlet_testkit::fields::Field;
use serde_json::{Map, Value, json};

use crate::class::{self, Class};
use crate::outcomes::UPDATE;

/// A pod with one extreme value; all other values are ordinary. The value is built with the pod: all of them
/// take 870 MB.
#[derive(Debug, Clone)]
pub struct Case {
    /// Path of the field with the extreme value.
    pub path: String,
    /// Name of the extreme value.
    pub extreme: String,
}

/// Drivers that in-tree types became.
const MIGRATED: [&str; 7] = [
    "csi.vsphere.vmware.com",
    "cinder.csi.openstack.org",
    "disk.csi.azure.com",
    "ebs.csi.aws.com",
    "file.csi.azure.com",
    "pd.csi.storage.gke.io",
    "pxd.portworx.com",
];

/// Values that an unoptimized build decodes for up to a second.
const LARGE: [&str; 4] = ["1-mib", "10000-items", "10000-entries", LONG_KEY];

const NO_ITEMS: &str = "no-items";
const LONG_KEY: &str = "key-of-1-mib";
const EMPTY_KEY: &str = "key-empty";
const UPWARD_KEY: &str = "key-upwards";

/// All cases, and the data from which their pods are built.
#[derive(Debug)]
pub struct Cases {
    classes: BTreeMap<String, Class>,
    owners: BTreeMap<String, String>,
    all: Vec<Case>,
}

/// Container lists other than the first. Their fields are those of the first, and mostly handled by the same
/// code.
const ALIKE: [&str; 2] = ["spec.initContainers[].", "spec.ephemeralContainers[]."];

/// Returns objects of the drivers that in-tree types became. Without them, volumes of these types wait for an
/// attachment, which no controller of the tests makes, and the kubelet sends no event for that.
#[must_use]
pub fn drivers_of_migrated_types() -> Vec<Value> {
    MIGRATED.map(|name| json!({"metadata": {"name": name}, "spec": {"attachRequired": false}})).to_vec()
}

/// Fields that others require, since a validator would otherwise reject the pod before it reads the extreme
/// value: a part of a path, the required sibling field (or the path of another field of the spec), and a
/// valid value. `POD` in it stands for the name of the pod: a volume that several pods share has one
/// operation at a time, whose event only one of them gets.
fn needed_beside() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("volumes[].secret.", "secretName", json!("x")),
        ("volumes[].storageos.", "volumeName", json!("x")),
        ("volumes[].scaleIO.", "volumeName", json!("x")),
        ("volumes[].rbd.", "monitors", json!(["192.0.2.1"])),
        ("volumes[].cephfs.", "monitors", json!(["192.0.2.1"])),
        ("volumes[].fc.fsType", "wwids", json!(["x"])),
        ("volumes[].fc.readOnly", "wwids", json!(["x"])),
        ("volumes[].fc.lun", "targetWWNs", json!(["x"])),
        ("volumes[].fc.targetWWNs", "lun", json!(1)),
        ("volumes[].iscsi.chapAuth", "secretRef", json!({"name": "x"})),
        ("volumes[].awsElasticBlockStore.", "volumeID", json!("vol-POD")),
        ("volumes[].azureDisk.", "diskURI", json!("https://example.test/POD.vhd")),
        ("volumes[].azureFile.", "shareName", json!("POD")),
        ("volumes[].cinder.", "volumeID", json!("POD")),
        ("volumes[].gcePersistentDisk.", "pdName", json!("POD")),
        ("volumes[].portworxVolume.", "volumeID", json!("POD")),
        ("volumes[].vsphereVolume.", "volumePath", json!("POD")),
        ("volumes[].image.", "reference", json!("example.test/app:1")),
        ("downwardAPI.items[].mode", "fieldRef", json!({"fieldPath": "metadata.name"})),
        ("downwardAPI.items[].path", "fieldRef", json!({"fieldPath": "metadata.name"})),
        ("resourceFieldRef.", "containerName", json!("main")),
        ("fileKeyRef.", "spec.volumes", json!([{"name": "x", "emptyDir": {}}])),
        ("envFrom[].prefix", "configMapRef", json!({"name": "x"})),
        ("managedFields[].", "operation", json!("Apply")),
        ("matchExpressions[].key", "values", json!(["x"])),
        ("matchExpressions[].operator", "values", json!(["x"])),
        ("matchFields[].", "key", json!("metadata.name")),
        ("matchFields[].key", "values", json!(["x"])),
        ("matchFields[].operator", "values", json!(["x"])),
        (".matchLabelKeys", "labelSelector", json!({})),
        (".mismatchLabelKeys", "labelSelector", json!({})),
        ("tolerations[].effect", "operator", json!("Exists")),
        ("tolerations[].tolerationSeconds", "operator", json!("Exists")),
        ("tolerations[].tolerationSeconds", "effect", json!("NoExecute")),
        ("tolerations[].value", "key", json!("x")),
        ("tolerations[].operator", "key", json!("x")),
        ("lifecycle.stopSignal", "spec.os", json!({"name": "linux"})),
        ("ontainers[].restartPolicyRules", "restartPolicy", json!("Never")),
        ("restartPolicyRules[].action", "exitCodes", json!({"operator": "In", "values": [1]})),
        ("seccompProfile.localhostProfile", "type", json!("Localhost")),
        ("appArmorProfile.localhostProfile", "type", json!("Localhost")),
        ("volumeMounts[].recursiveReadOnly", "readOnly", json!(true)),
        ("initContainers[].lifecycle", "restartPolicy", json!("Always")),
        ("initContainers[].livenessProbe", "restartPolicy", json!("Always")),
        ("initContainers[].readinessProbe", "restartPolicy", json!("Always")),
        ("initContainers[].startupProbe", "restartPolicy", json!("Always")),
    ]
}

impl Cases {
    /// Returns the cases of a pod.
    ///
    /// # Panics
    /// A field has no class.
    #[must_use]
    pub fn of_pod() -> Self {
        let fields = class::fields_of_pod();
        let class = |field: &Field| {
            class::of(field).unwrap_or_else(|| panic!("{} ({}) has no class", field.path, field.owner))
        };
        let classes: BTreeMap<String, Class> = fields.iter().map(|f| (f.path.clone(), class(f))).collect();
        let owners_of = fields.iter().map(|f| (f.path.clone(), f.owner.clone())).collect();
        let mut cases = Self { classes, owners: owners_of, all: Vec::new() };
        let mut owners = BTreeSet::new();
        for field in &fields {
            let mut of_field = cases.of_field(field);
            // The longest values take the longest time, so they are used once per field of a type.
            if !owners.insert((field.owner.as_str(), field.path.ends_with('}'))) {
                of_field.retain(|case| !case.extreme.ends_with("1-mib"));
            }
            if ALIKE.iter().any(|kind| field.path.starts_with(kind)) {
                of_field.truncate(1);
            }
            cases.all.extend(of_field);
        }
        cases
    }

    /// Returns all cases, in the order of the fields.
    #[must_use]
    pub fn all(&self) -> &[Case] {
        &self.all
    }

    /// Returns the cases of the gate: all small ones, and each large value once per type that has it. A long
    /// run (`QUINTLET_SOAK=1`) and one that writes the expected outcomes have all cases.
    #[must_use]
    pub fn of_gate(&self) -> Vec<&Case> {
        let is_long_run = quintlet_testkit::budget::is_long_run() || std::env::var_os(UPDATE).is_some();
        let mut seen = BTreeSet::new();
        let mut is_chosen = |case: &Case| {
            if is_long_run || !LARGE.contains(&case.extreme.as_str()) {
                return true;
            }
            let owner = self.owner(case);
            let kind = owner.split('.').next().unwrap_or_default().to_owned();
            seen.insert((kind, case.extreme.clone()))
        };
        self.all.iter().filter(|case| is_chosen(case)).collect()
    }

    /// Returns type and name of a case's field, with a mark for list items and map values:
    /// `ContainerPort.hostPort`.
    #[must_use]
    pub fn owner(&self, case: &Case) -> String {
        let mark = if case.path.ends_with([']', '}']) { "[]" } else { "" };
        format!("{}{mark}", self.owners[&case.path])
    }

    fn of_field(&self, field: &Field) -> Vec<Case> {
        let names: Vec<String> = match self.classes[&field.path] {
            Class::List(many) => vec![format!("{many}-items"), NO_ITEMS.to_owned()],
            Class::Map(many) => {
                let keys = [LONG_KEY, EMPTY_KEY, UPWARD_KEY].map(str::to_owned);
                std::iter::once(format!("{many}-entries")).chain(keys).collect()
            }
            class => class.extremes().into_iter().map(|(name, _)| name.to_owned()).collect(),
        };
        names.into_iter().map(|extreme| Case { path: field.path.clone(), extreme }).collect()
    }

    fn value(&self, Case { path, extreme }: &Case) -> Value {
        match self.classes[path] {
            Class::List(_) if extreme == NO_ITEMS => json!([]),
            Class::List(many) => {
                let item = self.good_at(&format!("{path}[]"));
                (0..many).map(|i| numbered(&item, i)).collect()
            }
            Class::Map(many) => {
                let keys = match extreme.as_str() {
                    LONG_KEY => vec!["k".repeat(class::MIB)],
                    EMPTY_KEY => vec![String::new()],
                    UPWARD_KEY => vec!["../../../etc/passwd".to_owned()],
                    _ => (0..many).map(|i| format!("key-{i}")).collect(),
                };
                let value = self.good_at(&format!("{path}{{}}"));
                Value::Object(keys.into_iter().map(|key| (key, value.clone())).collect::<Map<_, _>>())
            }
            class => {
                let named = class.extremes().into_iter().find(|(name, _)| name == extreme);
                named.map(|(_, value)| value()).expect("a case has the name of an extreme value of its class")
            }
        }
    }

    /// Returns a valid value for a field, with its required fields.
    fn good_at(&self, path: &str) -> Value {
        if let Some(class) = self.classes.get(path) {
            return class.good();
        }
        // An object: its required fields are those that the types set by default.
        let mut pod = base(path);
        place(&mut pod, path, json!({}));
        self.fill(&mut pod);
        let mut at = &pod;
        for step in steps(path) {
            at = match step {
                Step::Field(name) => &at[name],
                Step::Item => &at[0],
                Step::Entry => &at["key"],
            };
        }
        at.clone()
    }

    /// Builds the pod of a case.
    #[must_use]
    pub fn pod(&self, case: &Case, name: &str) -> Value {
        let mut pod = base(&case.path);
        pod["metadata"]["name"] = json!(name);
        for (part, beside, value) in needed_beside() {
            let Some(at) = case.path.find(part) else { continue };
            let up_to = &case.path[..at + part.rfind('.').map_or(0, |dot| dot + 1)];
            let up_to = if beside.starts_with("spec.") { "" } else { up_to };
            let value = value.as_str().map_or(value.clone(), |text| json!(text.replace("POD", name)));
            place(&mut pod, &format!("{up_to}{beside}"), value);
        }
        if let Some(class) = self.classes.get(&case.path) {
            place(&mut pod, &case.path, class.good());
        }
        self.fill(&mut pod);
        place(&mut pod, &case.path, self.value(case));
        pod
    }

    /// Adds the required fields, which the types have even if the JSON does not.
    fn fill(&self, pod: &mut Value) {
        let typed: Pod = serde_json::from_value(pod.clone()).expect("good values are decoded");
        let full = serde_json::to_value(typed).expect("a pod is JSON");
        self.fill_below(pod, &full, "");
    }

    fn fill_below(&self, have: &mut Value, full: &Value, path: &str) {
        match full {
            Value::Object(fields) => {
                let Some(have) = have.as_object_mut() else { return };
                for (name, value) in fields {
                    let below = match self.classes.get(path) {
                        Some(Class::Map(_)) => format!("{path}{{}}"),
                        _ if path.is_empty() => name.clone(),
                        _ => format!("{path}.{name}"),
                    };
                    if !have.contains_key(name) {
                        let good = self.classes.get(&below).map_or_else(|| value.clone(), |c| c.good());
                        have.insert(name.clone(), good);
                    }
                    self.fill_below(&mut have[name], value, &below);
                }
            }
            Value::Array(items) => {
                let Some(have) = have.as_array_mut() else { return };
                for (have, full) in have.iter_mut().zip(items) {
                    self.fill_below(have, full, &format!("{path}[]"));
                }
            }
            _ => {}
        }
    }
}

/// Returns the item under another name, since names and paths must be unique.
fn numbered(item: &Value, number: usize) -> Value {
    let mut item = item.clone();
    match &mut item {
        Value::Object(fields) => {
            for name in ["name", "mountPath", "devicePath", "containerPort", "path"] {
                match fields.get_mut(name) {
                    Some(Value::String(text)) => *text = format!("{text}{number}"),
                    Some(Value::Number(n)) => *n = (1 + number).into(),
                    _ => {}
                }
            }
        }
        Value::String(text) => text.push_str(&number.to_string()),
        _ => {}
    }
    item
}

/// Returns a pod with one container that has the fields around `path`.
fn base(path: &str) -> Value {
    let image = "example.test/app:1";
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "hostile", "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": image, "imagePullPolicy": "IfNotPresent"}],
        },
    });
    if let Some(kind) = ALIKE.iter().find(|kind| path.starts_with(**kind)) {
        let kind = kind.trim_start_matches("spec.").trim_end_matches("[].");
        pod["spec"][kind] = json!([{"name": "other", "image": image, "imagePullPolicy": "IfNotPresent"}]);
    }
    if path.starts_with("spec.volumes[]") {
        pod["spec"]["volumes"] = json!([{"name": "v"}]);
        pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
        if path == "spec.volumes[].name" {
            pod["spec"]["volumes"][0]["emptyDir"] = json!({});
        }
    }
    if path.contains(".volumeMounts[].") || path.contains(".volumeDevices[].") {
        pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    }
    if let Some((probe, field)) = path.split_once("Probe.")
        && !["exec", "httpGet", "tcpSocket", "grpc"].iter().any(|handler| field.starts_with(handler))
    {
        place(&mut pod, &format!("{probe}Probe.exec.command"), json!(["true"]));
    }
    pod
}

enum Step<'a> {
    Field(&'a str),
    Item,
    Entry,
}

fn steps(path: &str) -> Vec<Step<'_>> {
    let mut out = Vec::new();
    for part in path.split('.') {
        let end = part.find(['[', '{']).unwrap_or(part.len());
        out.push(Step::Field(&part[..end]));
        match &part[end..] {
            "[]" => out.push(Step::Item),
            "{}" => out.push(Step::Entry),
            _ => {}
        }
    }
    out
}

/// Sets a value at a path. Lists and maps on the path get one item.
fn place(pod: &mut Value, path: &str, value: Value) {
    let mut at = pod;
    for step in steps(path) {
        at = match step {
            Step::Field(name) => child(at, name),
            Step::Entry => child(at, "key"),
            Step::Item => {
                if !at.is_array() {
                    *at = json!([]);
                }
                let items = at.as_array_mut().expect("it was made a list");
                if items.is_empty() {
                    items.push(json!({}));
                }
                &mut items[0]
            }
        };
    }
    *at = value;
}

fn child<'a>(at: &'a mut Value, name: &str) -> &'a mut Value {
    if !at.is_object() {
        *at = json!({});
    }
    let fields = at.as_object_mut().expect("it was made an object");
    fields.entry(name).or_insert(Value::Null)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_has_a_class_and_every_class_a_field() {
        let fields = class::fields_of_pod();
        let without: Vec<&str> =
            fields.iter().filter(|f| class::of(f).is_none()).map(|f| f.owner.as_str()).collect();
        assert_eq!(without, Vec::<&str>::new(), "fields without a class");
        assert_eq!(class::unused(&fields), Vec::<&str>::new(), "classes of no field");
    }

    #[test]
    fn a_case_has_the_extreme_value_and_the_fields_that_it_requires() {
        let cases = Cases::of_pod();
        let pod = |path: &str, extreme: &str| {
            let case = cases.all().iter().find(|c| c.path == path && c.extreme == extreme).unwrap();
            cases.pod(case, "hostile")
        };
        let got = pod("spec.containers[].livenessProbe.periodSeconds", "max");
        let probe = &got["spec"]["containers"][0]["livenessProbe"];
        assert_eq!(probe["periodSeconds"], i32::MAX);
        assert_eq!(probe["exec"]["command"], json!(["true"]));
        let got = pod("spec.volumes[].configMap.items[].path", "upwards");
        let volume = &got["spec"]["volumes"][0];
        assert_eq!(volume["configMap"]["items"][0]["key"], "x");
        assert_eq!(volume["configMap"]["name"], "x");
        assert_eq!(got["spec"]["containers"][0]["volumeMounts"][0]["name"], volume["name"]);
        let got = pod("spec.containers", "1000-items");
        assert_eq!(got["spec"]["containers"].as_array().unwrap().len(), 1000);
        assert_eq!(got["spec"]["containers"][999]["name"], "x999");
        let got = pod("spec.containers[].env", "10000-items");
        assert_eq!(got["spec"]["containers"][0]["env"].as_array().unwrap().len(), 10_000);
        let got = pod("spec.containers[].resources.limits{}", "max");
        assert_eq!(got["spec"]["containers"][0]["resources"]["limits"]["key"], "9223372036854775807");
    }
}
