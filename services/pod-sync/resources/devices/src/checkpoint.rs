//! The kubelet's checkpoint of device allocations (`pkg/kubelet/cm/devicemanager/checkpoint`): JSON with a
//! checksum of what Go prints for the data. Files of kubelets before 1.21, without NUMA nodes, can be read,
//! too.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use quintlet_model::hash::GoHash;
use serde::{Deserialize, Serialize};

use crate::allocations::{Allocation, PodDevices};
use crate::device::{DeviceId, NO_NUMA_NODE};

/// Name of the file in the directory of device plugins.
pub const CHECKPOINT: &str = "kubelet_internal_checkpoint";

/// The content of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceCheckpoint {
    /// The devices that containers hold.
    pub held: PodDevices,
    /// Healthy devices by registered resource.
    pub registered: BTreeMap<String, Vec<DeviceId>>,
}

/// Reason why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CorruptCheckpoint {
    /// The file is not valid JSON, or has other fields.
    #[error("not a checkpoint of devices")]
    Unreadable(#[source] serde_json::Error),
    /// The checksum does not match.
    #[error("checkpoint is corrupt: its checksum is {found}, that of its data is {expected}")]
    Checksum {
        /// Checksum in the file.
        found: u64,
        /// Checksum of the data.
        expected: u64,
    },
    /// The response of a plugin is not Base64.
    #[error("failed to decode the response for {resource} of container {container:?} of pod {pod}")]
    Response {
        /// UID of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Name of the resource.
        resource: String,
        /// The cause.
        source: base64::DecodeError,
    },
}

// Go distinguishes a nil slice or map from an empty one, in JSON and in the checksum.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
    checksum: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    pod_device_entries: Option<Vec<PodEntry>>,
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct PodEntry {
    #[serde(rename = "PodUID", default)]
    pod_uid: String,
    #[serde(default)]
    container_name: String,
    #[serde(default)]
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: Option<EntryDevices>,
    alloc_resp: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum EntryDevices {
    // Kubelets before 1.21.
    List(Vec<String>),
    PerNumaNode(BTreeMap<NodeKey, Option<Vec<String>>>),
}

// A NUMA node. JSON has numbers as keys in quotes, and the order is that of the numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct NodeKey(i64);

impl TryFrom<String> for NodeKey {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self)
    }
}

impl From<NodeKey> for String {
    fn from(key: NodeKey) -> Self {
        key.0.to_string()
    }
}

impl fmt::Display for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Returns the content of a checkpoint file.
///
/// # Errors
/// Serialization failed, which strings and numbers do not cause.
pub fn encode(checkpoint: &DeviceCheckpoint) -> Result<Vec<u8>, serde_json::Error> {
    let strings = |ids: &[DeviceId]| Some(ids.iter().map(ToString::to_string).collect());
    let entries = checkpoint.held.all().map(|(pod, container, resource, held)| {
        let devices = held.devices.iter().map(|(node, ids)| (NodeKey(*node), strings(ids)));
        PodEntry {
            pod_uid: pod.to_owned(),
            container_name: container.to_owned(),
            resource_name: resource.to_owned(),
            device_ids: Some(EntryDevices::PerNumaNode(devices.collect())),
            alloc_resp: Some(STANDARD.encode(&held.response)),
        }
    });
    let entries: Vec<_> = entries.collect();
    let registered = checkpoint.registered.iter().map(|(name, ids)| (name.clone(), strings(ids)));
    let data = Data {
        pod_device_entries: Some(entries).filter(|entries| !entries.is_empty()),
        registered_devices: Some(registered.collect()),
    };
    let checksum = checksum(&data);
    serde_json::to_vec(&File { data, checksum })
}

/// Parses a checkpoint file.
///
/// # Errors
/// See [`CorruptCheckpoint`].
pub fn decode(bytes: &[u8]) -> Result<DeviceCheckpoint, CorruptCheckpoint> {
    let File { data, checksum: found } =
        serde_json::from_slice(bytes).map_err(CorruptCheckpoint::Unreadable)?;
    let expected = checksum(&data);
    if found != expected {
        return Err(CorruptCheckpoint::Checksum { found, expected });
    }
    let mut checkpoint = DeviceCheckpoint::default();
    for entry in data.pod_device_entries.unwrap_or_default() {
        let response = STANDARD.decode(entry.alloc_resp.unwrap_or_default()).map_err(|source| {
            let (pod, container) = (entry.pod_uid.clone(), entry.container_name.clone());
            CorruptCheckpoint::Response { pod, container, resource: entry.resource_name.clone(), source }
        })?;
        let devices = match entry.device_ids {
            Some(EntryDevices::List(ids)) => [(NO_NUMA_NODE, device_ids(ids))].into(),
            Some(EntryDevices::PerNumaNode(nodes)) => {
                nodes.into_iter().map(|(node, ids)| (node.0, device_ids(ids.unwrap_or_default()))).collect()
            }
            None => BTreeMap::new(),
        };
        let allocation = Allocation { devices, response };
        checkpoint.held.insert(&entry.pod_uid, &entry.container_name, &entry.resource_name, allocation);
    }
    let registered = data.registered_devices.unwrap_or_default().into_iter();
    checkpoint.registered =
        registered.map(|(name, ids)| (name, device_ids(ids.unwrap_or_default()))).collect();
    Ok(checkpoint)
}

fn device_ids(ids: Vec<String>) -> Vec<DeviceId> {
    ids.into_iter().map(DeviceId::from).collect()
}

/// Returns the hash of what Go prints for the data with types.
fn checksum(data: &Data) -> u64 {
    // The writer never fails.
    GoHash::of(|out| print(out, data)).unwrap_or_default()
}

fn print(out: &mut GoHash, data: &Data) -> fmt::Result {
    out.write_str("(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)")?;
    match &data.pod_device_entries {
        None => out.write_str("<nil>")?,
        Some(entries) => {
            out.write_char('[')?;
            out.separated(entries, print_entry)?;
            out.write_char(']')?;
        }
    }
    out.write_str(" RegisteredDevices:(map[string][]string)")?;
    match &data.registered_devices {
        None => out.write_str("<nil>")?,
        Some(resources) => {
            print_map(out, resources.iter().map(|(name, ids)| (name, ids.as_deref())))?;
        }
    }
    out.write_char('}')
}

fn print_entry(out: &mut GoHash, entry: &PodEntry) -> fmt::Result {
    let PodEntry { pod_uid, container_name, resource_name, device_ids, alloc_resp } = entry;
    write!(
        out,
        "{{PodUID:(string){pod_uid} ContainerName:(string){container_name} ResourceName:(string){resource_name} DeviceIDs:"
    )?;
    match device_ids {
        Some(EntryDevices::List(ids)) => {
            out.write_str("([]string)")?;
            print_list(out, Some(ids))?;
        }
        Some(EntryDevices::PerNumaNode(nodes)) => {
            out.write_str("(checkpoint.DevicesPerNUMA)")?;
            print_map(out, nodes.iter().map(|(node, ids)| (node, ids.as_deref())))?;
        }
        None => out.write_str("(checkpoint.DevicesPerNUMA)<nil>")?,
    }
    out.write_str(" AllocResp:([]uint8)")?;
    // What is not Base64 is found later.
    let bytes = alloc_resp.as_ref().map(|text| STANDARD.decode(text).unwrap_or_default());
    print_list(out, bytes.as_deref())?;
    out.write_char('}')
}

fn print_map<'a>(
    out: &mut GoHash,
    entries: impl Iterator<Item = (impl fmt::Display, Option<&'a [String]>)>,
) -> fmt::Result {
    out.write_str("map[")?;
    out.separated(entries, |out, (key, ids)| {
        write!(out, "{key}:")?;
        print_list(out, ids)
    })?;
    out.write_char(']')
}

fn print_list(out: &mut GoHash, values: Option<&[impl fmt::Display]>) -> fmt::Result {
    let Some(values) = values else { return out.write_str("<nil>") };
    out.write_char('[')?;
    out.separated(values, |out, value| write!(out, "{value}"))?;
    out.write_char(']')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(names: &str) -> Vec<DeviceId> {
        names.split_whitespace().map(DeviceId::from).collect()
    }

    // Written by kubelets of 1.21 and later.
    const OF_KUBELET: &str = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"bf52b2cd-b611-4e79-86b1-280b283185c3","ContainerName":"check","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["tegra"]},"AllocResp":"Ch8KFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSBXRlZ3Jh"}],"RegisteredDevices":{"nvidia.com/gpu":["tegra"]}},"Checksum":3660592824}"#;
    const WITHOUT_PODS: &str = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"nvidia.com/gpu":["GPU-0650a168-e770-3ea8-8ac3-8a1d419763e0"]}},"Checksum":3952659280}"#;

    #[test]
    fn checkpoints_of_kubelets_are_read_and_written_again_byte_for_byte() {
        let read = decode(OF_KUBELET.as_bytes()).unwrap();
        let held = read.held.held("bf52b2cd-b611-4e79-86b1-280b283185c3", "check", "nvidia.com/gpu");
        assert_eq!(held, Some(ids("tegra").into_iter().collect()));
        assert_eq!(read.registered, [("nvidia.com/gpu".to_owned(), ids("tegra"))].into());
        for text in [OF_KUBELET, WITHOUT_PODS] {
            let again = encode(&decode(text.as_bytes()).unwrap()).unwrap();
            assert_eq!(String::from_utf8(again).unwrap(), text);
        }
    }

    #[test]
    fn a_checkpoint_without_numa_nodes_is_read() {
        // The checksum was computed by another implementation.
        let text = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"main","ResourceName":"a.com/gpu","DeviceIDs":["d1","d2"],"AllocResp":"CgYKAUESATE="}],"RegisteredDevices":{"a.com/gpu":["d1","d2"]}},"Checksum":1554427750}"#;
        let read = decode(text.as_bytes()).unwrap();
        let held = &read.held.container("u1", "main").unwrap()["a.com/gpu"];
        assert_eq!(held.devices, [(NO_NUMA_NODE, ids("d1 d2"))].into());
        assert_eq!(held.response, [10, 6, 10, 1, 65, 18, 1, 49]);
    }

    #[test]
    fn numa_nodes_are_numbers_in_the_checksum() {
        let mut checkpoint = DeviceCheckpoint::default();
        let devices = [(-1, ids("d2")), (0, ids("d1"))].into();
        let allocation = Allocation { devices, response: vec![10, 6, 10, 1, 65, 18, 1, 49] };
        checkpoint.held.insert("u1", "main", "a.com/gpu", allocation);
        checkpoint.registered.insert("a.com/gpu".to_owned(), ids("d1 d2"));
        let text = String::from_utf8(encode(&checkpoint).unwrap()).unwrap();
        // Computed by another implementation.
        assert!(text.ends_with(r#""Checksum":799999214}"#), "{text}");
        let empty = String::from_utf8(encode(&DeviceCheckpoint::default()).unwrap()).unwrap();
        let expected = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}"#;
        assert_eq!(empty, expected);
    }

    #[test]
    fn a_torn_or_changed_checkpoint_is_refused() {
        for cut in [0, 1, OF_KUBELET.len() / 2, OF_KUBELET.len() - 1] {
            let torn = decode(&OF_KUBELET.as_bytes()[..cut]);
            assert!(matches!(torn, Err(CorruptCheckpoint::Unreadable(_))), "{cut}");
        }
        let refused = |text: String| decode(text.as_bytes()).unwrap_err().to_string();
        let changed = refused(OF_KUBELET.replace("[\"tegra\"]", "[\"other\"]"));
        assert!(changed.contains("checksum is 3660592824"), "{changed}");
        assert!(refused("{}".to_owned()).contains("not a checkpoint"));
        assert!(refused(OF_KUBELET.replace("Ch8KF", "!!!!!")).contains("corrupt"));
        let data = |response: &str| {
            let entry = PodEntry {
                pod_uid: "u".to_owned(),
                container_name: "c".to_owned(),
                resource_name: "r".to_owned(),
                device_ids: None,
                alloc_resp: Some(response.to_owned()),
            };
            Data { pod_device_entries: Some(vec![entry]), registered_devices: None }
        };
        let file = |data: Data| serde_json::to_string(&File { checksum: checksum(&data), data }).unwrap();
        assert!(refused(file(data("%"))).contains("failed to decode the response for r"));
        assert!(decode(file(data("")).as_bytes()).is_ok());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            entries in prop::collection::vec(("[a-z]{0,3}", "[a-z]{0,2}", -1_i64..3, "\\PC{0,9}"), 0..8),
        ) {
            let mut checkpoint = DeviceCheckpoint::default();
            for (pod, container, node, device) in entries {
                checkpoint.registered.insert(device.clone(), vec![DeviceId::from(&*device)]);
                let devices = [(node, vec![DeviceId::from(&*device)])].into();
                let allocation = Allocation { devices, response: device.into_bytes() };
                checkpoint.held.insert(&pod, &container, "a.com/r", allocation);
            }
            prop_assert_eq!(decode(&encode(&checkpoint).unwrap()).unwrap(), checkpoint);
        }
    }
}
