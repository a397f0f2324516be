//! The kubelet's checkpoint of claims (`pkg/kubelet/cm/dra/state`): JSON with a text of JSON and its CRC-32.
//! Files of earlier kubelets, without some of the fields, can be read, too.

use std::collections::BTreeMap;

use quintlet_model::hash::escape_as_go;
use serde::{Deserialize, Serialize};

use crate::claim::ClaimKey;
use crate::inventory::{ClaimRecord, PreparedDevice};

/// Name of the file in the root directory.
pub const CHECKPOINT: &str = "dra_manager_state";

const KIND: &str = "DRACheckpoint";
const VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";

/// Reason why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CorruptCheckpoint {
    /// The file is not valid JSON, or has other fields.
    #[error("not a checkpoint of claims")]
    Unreadable(#[source] serde_json::Error),
    /// The checksum does not match.
    #[error("checkpoint is corrupt: its checksum is {found}, that of its data is {expected}")]
    Checksum {
        /// Checksum in the file.
        found: u32,
        /// Checksum of the data.
        expected: u32,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: String,
    checksum: u32,
}

#[derive(Serialize, Deserialize)]
struct Data {
    #[serde(default)]
    kind: String,
    #[serde(rename = "apiVersion", default)]
    api_version: String,
    // Go distinguishes a nil slice or map from an empty one.
    #[serde(rename = "ClaimInfoStateList", default)]
    claims: Option<Vec<ClaimData>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
#[derive(Default)]
struct ClaimData {
    #[serde(rename = "ClaimUID")]
    uid: String,
    claim_name: String,
    namespace: String,
    #[serde(rename = "PodUIDs")]
    pods: Option<BTreeMap<String, Nothing>>,
    driver_state: Option<BTreeMap<String, DriverData>>,
}

#[derive(Default, Serialize, Deserialize)]
struct Nothing {}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct DriverData {
    devices: Option<Vec<DeviceData>>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct DeviceData {
    pool_name: String,
    device_name: String,
    #[serde(rename = "ShareID")]
    share: Option<String>,
    request_names: Option<Vec<String>>,
    #[serde(rename = "CDIDeviceIDs")]
    cdi: Option<Vec<String>>,
}

/// Returns the content of a checkpoint file.
///
/// # Errors
/// Serialization failed, which strings do not cause.
pub fn encode(records: &BTreeMap<ClaimKey, ClaimRecord>) -> Result<Vec<u8>, serde_json::Error> {
    let list = |texts: &[String]| Some(texts.to_vec()).filter(|texts| !texts.is_empty());
    let device = |device: &PreparedDevice| DeviceData {
        pool_name: device.pool.clone(),
        device_name: device.device.clone(),
        share: device.share.clone(),
        request_names: list(&device.requests),
        cdi: list(&device.cdi),
    };
    let driver = |devices: &[PreparedDevice]| DriverData {
        devices: Some(devices.iter().map(device).collect()).filter(|devices: &Vec<_>| !devices.is_empty()),
    };
    let claim = |(key, record): (&ClaimKey, &ClaimRecord)| ClaimData {
        uid: record.uid.clone(),
        claim_name: key.name.clone(),
        namespace: key.namespace.clone(),
        pods: Some(record.pods.iter().map(|pod| (pod.clone(), Nothing {})).collect()),
        driver_state: Some(record.drivers.iter().map(|(name, all)| (name.clone(), driver(all))).collect()),
    };
    let claims = Some(records.iter().map(claim).collect());
    let data = Data { kind: KIND.to_owned(), api_version: VERSION.to_owned(), claims };
    let data = escape_as_go(&serde_json::to_string(&data)?);
    let checksum = crc32fast::hash(data.as_bytes());
    serde_json::to_string(&File { data, checksum }).map(|text| escape_as_go(&text).into_bytes())
}

/// Parses a checkpoint file. An entry without a name is left out.
///
/// # Errors
/// See [`CorruptCheckpoint`].
pub fn decode(bytes: &[u8]) -> Result<BTreeMap<ClaimKey, ClaimRecord>, CorruptCheckpoint> {
    let File { data, checksum: found } =
        serde_json::from_slice(bytes).map_err(CorruptCheckpoint::Unreadable)?;
    let expected = crc32fast::hash(data.as_bytes());
    if found != expected {
        return Err(CorruptCheckpoint::Checksum { found, expected });
    }
    let data: Data = serde_json::from_str(&data).map_err(CorruptCheckpoint::Unreadable)?;
    let device = |device: DeviceData| PreparedDevice {
        pool: device.pool_name,
        device: device.device_name,
        share: device.share,
        requests: device.request_names.unwrap_or_default(),
        cdi: device.cdi.unwrap_or_default(),
    };
    let claims = data.claims.unwrap_or_default().into_iter().filter(|claim| !claim.claim_name.is_empty());
    let record = |claim: ClaimData| {
        let drivers = claim.driver_state.unwrap_or_default().into_iter();
        let record = ClaimRecord {
            uid: claim.uid,
            pods: claim.pods.unwrap_or_default().into_keys().collect(),
            drivers: drivers
                .map(|(name, all)| (name, all.devices.unwrap_or_default().into_iter().map(device).collect()))
                .collect(),
        };
        (ClaimKey { namespace: claim.namespace, name: claim.claim_name }, record)
    };
    Ok(claims.map(record).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // Written by kubelet 1.36 for the claims of its own test tables.
    const ONE: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[{\"ClaimUID\":\"067798be-454e-4be4-9047-1aa06aea63f7\",\"ClaimName\":\"example\",\"Namespace\":\"default\",\"PodUIDs\":{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{}},\"DriverState\":{\"test-driver.cdi.k8s.io\":{\"Devices\":[{\"PoolName\":\"worker-1\",\"DeviceName\":\"dev-1\",\"ShareID\":\"aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa\",\"RequestNames\":[\"test request\"],\"CDIDeviceIDs\":[\"example.com/example=cdi-example\"]}]}}}]}","Checksum":736302156}"#;
    const TWO: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[{\"ClaimUID\":\"067798be-454e-4be4-9047-1aa06aea63f7\",\"ClaimName\":\"example-1\",\"Namespace\":\"default\",\"PodUIDs\":{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{}},\"DriverState\":{\"test-driver.cdi.k8s.io\":{\"Devices\":[{\"PoolName\":\"worker-1\",\"DeviceName\":\"dev-1\",\"ShareID\":null,\"RequestNames\":[\"test request\"],\"CDIDeviceIDs\":[\"example.com/example=cdi-example\"]}]}}},{\"ClaimUID\":\"4cf8db2d-06c0-7d70-1a51-e59b25b2c16c\",\"ClaimName\":\"example-2\",\"Namespace\":\"default\",\"PodUIDs\":{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{}},\"DriverState\":{\"test-driver.cdi.k8s.io\":{\"Devices\":[{\"PoolName\":\"worker-1\",\"DeviceName\":\"dev-2\",\"ShareID\":null,\"RequestNames\":null,\"CDIDeviceIDs\":null}]}}}]}","Checksum":2820117767}"#;
    const EMPTY: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[]}","Checksum":2361995144}"#;
    // Without ShareID and RequestNames, and of another version.
    const OLD: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v0\",\"ClaimInfoStateList\":[{\"ClaimUID\":\"067798be-454e-4be4-9047-1aa06aea63f7\",\"ClaimName\":\"example\",\"Namespace\":\"default\",\"PodUIDs\":{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{}},\"DriverState\":{\"test-driver.cdi.k8s.io\":{\"Devices\":[{\"PoolName\":\"worker-1\",\"DeviceName\":\"dev-1\",\"CDIDeviceIDs\":[\"example.com/example=cdi-example\"]}]}}}]}","Checksum":1284376732}"#;

    fn key(name: &str) -> ClaimKey {
        ClaimKey { namespace: "default".to_owned(), name: name.to_owned() }
    }

    #[test]
    fn checkpoints_of_kubelets_are_read_and_written_again_byte_for_byte() {
        for text in [ONE, TWO, EMPTY] {
            let again = encode(&decode(text.as_bytes()).unwrap()).unwrap();
            assert_eq!(String::from_utf8(again).unwrap(), text);
        }
        let read = decode(ONE.as_bytes()).unwrap();
        let record = &read[&key("example")];
        assert_eq!(record.uid, "067798be-454e-4be4-9047-1aa06aea63f7");
        assert_eq!(record.pods, ["139cdb46-f989-4f17-9561-ca10cfb509a6".to_owned()].into());
        let device = PreparedDevice {
            pool: "worker-1".to_owned(),
            device: "dev-1".to_owned(),
            share: Some("aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa".to_owned()),
            requests: vec!["test request".to_owned()],
            cdi: vec!["example.com/example=cdi-example".to_owned()],
        };
        assert_eq!(record.drivers, [("test-driver.cdi.k8s.io".to_owned(), vec![device])].into());
    }

    #[test]
    fn a_checkpoint_of_an_earlier_kubelet_is_read() {
        let read = decode(OLD.as_bytes()).unwrap();
        let device = &read[&key("example")].drivers["test-driver.cdi.k8s.io"][0];
        assert_eq!((device.share.as_ref(), device.requests.len(), device.cdi.len()), (None, 0, 1));
    }

    #[test]
    fn a_torn_or_changed_checkpoint_is_refused() {
        for cut in [0, 1, ONE.len() / 2, ONE.len() - 1] {
            let torn = decode(&ONE.as_bytes()[..cut]);
            assert!(matches!(torn, Err(CorruptCheckpoint::Unreadable(_))), "{cut}");
        }
        let refused = |text: &str| decode(text.as_bytes()).unwrap_err().to_string();
        assert!(refused(&ONE.replace("dev-1", "dev-2")).contains("its checksum is 736302156"));
        assert!(refused("{}").contains("not a checkpoint"));
        let data = "3".to_owned();
        let number = File { checksum: crc32fast::hash(data.as_bytes()), data };
        assert!(refused(&serde_json::to_string(&number).unwrap()).contains("not a checkpoint"));
    }

    #[test]
    fn characters_that_go_escapes_are_escaped() {
        let mut records = BTreeMap::new();
        let drivers = [("a<&>\u{2028}".to_owned(), Vec::new())].into();
        records.insert(key("c"), ClaimRecord { drivers, ..ClaimRecord::default() });
        let text = String::from_utf8(encode(&records).unwrap()).unwrap();
        assert!(text.contains(r"a\\u003c\\u0026\\u003e\\u2028"), "{text}");
        assert_eq!(decode(text.as_bytes()).unwrap(), records);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            claims in prop::collection::vec(
                ("[a-z]{1,2}", "\\PC{0,5}", "[a-z]{0,2}", "\\PC{0,5}", prop::option::of("[a-z]")), 0..8),
        ) {
            let mut records = BTreeMap::new();
            for (name, text, driver, cdi, share) in claims {
                let device = PreparedDevice {
                    pool: text.clone(), device: driver.clone(), share, requests: vec![text.clone()], cdi: vec![cdi],
                };
                let record = ClaimRecord {
                    uid: text.clone(), pods: [text].into(), drivers: [(driver, vec![device])].into(),
                };
                records.insert(key(&name), record);
            }
            prop_assert_eq!(decode(&encode(&records).unwrap()).unwrap(), records);
        }
    }
}
