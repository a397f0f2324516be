//! Computes the files of volumes from API objects (`pkg/volume/configmap`, `secret`, `projected`,
//! `downwardapi`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, Container, DownwardAPIVolumeFile, KeyToPath, Pod, Secret};
use pod_sync_cri_config::container::container_of_ephemeral;
use pod_sync_cri_config::fields::{ResourceField, metadata_field, resource_field};
use pod_sync_layout::NodeSettings;
use quintlet_model::pod;

use super::atomic::{FileProjection, Payload};

/// Limit of the files of all ConfigMaps, Secrets and projected volumes of one pod, in bytes. They are in
/// memory at the same time, and one key of an object may be in any number of them.
pub(crate) const MAX_FILE_BYTES: usize = 128 << 20;

/// Selection of the keys of an object that become files, and the modes of these files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeySelection<'a> {
    /// Keys and their paths; `None`: every key under its own name.
    pub(crate) items: Option<&'a [KeyToPath]>,
    /// Mode of files without their own.
    pub(crate) default_mode: Option<i32>,
    /// Missing keys are ignored.
    pub(crate) optional: bool,
    pub(crate) owners: FileOwners,
}

/// Owners of the files of a volume, inside the pod's user namespace.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FileOwners {
    /// The feature gate AtomicWriteVolumeUserFields is on.
    pub(crate) is_enabled: bool,
    /// `defaultUser` of the volume.
    pub(crate) default_user: Option<i64>,
}

impl FileOwners {
    /// Returns the owner of a file with this `user`. Without an owner, a file belongs to root, or a token to
    /// the user of all containers.
    pub(crate) fn owner(self, user: Option<i64>) -> Option<u32> {
        user.or(self.default_user).filter(|_| self.is_enabled).and_then(|user| u32::try_from(user).ok())
    }
}

// Only the permission bits of the number are used.
fn mode(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(0) & 0o777
}

/// Bytes of the files of one source.
#[derive(Debug, Default)]
struct Size(usize);

impl Size {
    /// Adds a file. Any number of items may name the same text.
    fn add(&mut self, bytes: usize) -> Result<(), String> {
        self.0 = self.0.saturating_add(bytes);
        if self.0 > MAX_FILE_BYTES { Err(too_large(MAX_FILE_BYTES)) } else { Ok(()) }
    }
}

fn select(
    data: &BTreeMap<&str, &[u8]>,
    how: KeySelection<'_>,
    missing: impl Fn(&str) -> String,
) -> Result<Payload, String> {
    let default = how
        .default_mode
        .ok_or_else(|| "no defaultMode used, not even the default value for it".to_owned())?;
    let file = |bytes: &[u8], own: Option<i32>, user: Option<i64>| FileProjection {
        data: bytes.to_vec(),
        mode: mode(own.unwrap_or(default)),
        owner: how.owners.owner(user),
    };
    let Some(items) = how.items.filter(|i| !i.is_empty()) else {
        return Ok(data.iter().map(|(k, v)| ((*k).to_owned(), file(v, None, None))).collect());
    };
    let mut out = Payload::new();
    let mut size = Size::default();
    for item in items {
        match data.get(item.key.as_str()) {
            Some(bytes) => {
                size.add(bytes.len())?;
                out.insert(item.path.clone(), file(bytes, item.mode, item.user));
            }
            None if how.optional => {}
            None => return Err(missing(&item.key)),
        }
    }
    Ok(out)
}

/// Returns the files of a ConfigMap. `None` stands for an optional ConfigMap that does not exist.
///
/// # Errors
/// Returns the kubelet's message.
pub(crate) fn config_map(object: Option<&ConfigMap>, how: KeySelection<'_>) -> Result<Payload, String> {
    let mut data = BTreeMap::new();
    if let Some(object) = object {
        data.extend(object.data.iter().flatten().map(|(k, v)| (k.as_str(), v.as_bytes())));
        data.extend(object.binary_data.iter().flatten().map(|(k, v)| (k.as_str(), v.0.as_slice())));
    }
    select(&data, how, |key| format!("configmap references non-existent config key: {key}"))
}

/// Returns the files of a Secret. `None` stands for an optional Secret that does not exist.
///
/// # Errors
/// Returns the kubelet's message.
pub(crate) fn secret(object: Option<&Secret>, how: KeySelection<'_>) -> Result<Payload, String> {
    let data = object
        .and_then(|o| o.data.as_ref())
        .into_iter()
        .flatten()
        .map(|(k, v)| (k.as_str(), v.0.as_slice()))
        .collect();
    select(&data, how, |key| format!("references non-existent secret key: {key}"))
}

/// Returns the files of the downward API.
///
/// # Errors
/// All errors, in brackets if there are several. The files are too large.
pub(crate) fn downward_api(
    pod: &Pod,
    items: &[DownwardAPIVolumeFile],
    default_mode: Option<i32>,
    owners: FileOwners,
    node: &NodeSettings,
) -> Result<Payload, String> {
    let default =
        default_mode.ok_or_else(|| "no defaultMode used, not even the default value for it".to_owned())?;
    let mut out = Payload::new();
    let mut problems = Vec::new();
    let mut size = Size::default();
    for item in items {
        let value = match (&item.field_ref, &item.resource_field_ref) {
            (Some(field), _) => metadata_field(pod, &field.field_path),
            (None, Some(selector)) => {
                resource_field(ResourceField { pod, own: None, allocatable: &node.allocatable }, selector)
            }
            (None, None) => continue,
        };
        match value {
            Ok(text) => {
                size.add(text.len())?;
                let mode = mode(item.mode.unwrap_or(default));
                let owner = owners.owner(item.user);
                out.insert(item.path.clone(), FileProjection { data: text.into_bytes(), mode, owner });
            }
            Err(e) => problems.push(e.to_string()),
        }
    }
    if problems.is_empty() { Ok(out) } else { Err(aggregate(problems)) }
}

/// Returns the total bytes of all files.
#[must_use]
pub(super) fn size(files: &Payload) -> usize {
    files.values().fold(0, |sum, file| sum.saturating_add(file.data.len()))
}

pub(super) fn too_large(most: usize) -> String {
    format!("the files of the pod's volumes take more than {most} bytes")
}

/// Joins errors into one message without duplicates: `[a, b]`
/// (`k8s.io/apimachinery/pkg/util/errors: NewAggregate`).
#[must_use]
pub(crate) fn aggregate(mut problems: Vec<String>) -> String {
    let mut seen = std::collections::BTreeSet::new();
    problems.retain(|p| seen.insert(p.clone()));
    if problems.len() == 1 { problems.remove(0) } else { format!("[{}]", problems.join(", ")) }
}

/// Returns the owner of token files: the runAsUser that all containers share
/// (`pkg/securitycontext: DetermineEffectiveRunAsUser`).
#[must_use]
pub(crate) fn fs_user(pod: &Pod) -> Option<i64> {
    let spec = pod::spec(pod);
    let of_pod = spec.security_context.as_ref().and_then(|c| c.run_as_user);
    let ephemeral: Vec<Container> =
        spec.ephemeral_containers.iter().flatten().map(container_of_ephemeral).collect();
    let mut users = spec
        .containers
        .iter()
        .chain(pod::init_containers(pod))
        .chain(&ephemeral)
        .map(|c| c.security_context.as_ref().and_then(|s| s.run_as_user).or(of_pod));
    let first = users.next()??;
    users.all(|u| u == Some(first)).then_some(first)
}

/// Returns a file with a token, or with certificates. It is private if the pod has a common user or an
/// fsGroup, which can then still read it. `owner` precedes the common user.
#[must_use]
pub(crate) fn private_file(
    pod: &Pod,
    content: &str,
    default_mode: i32,
    owner: Option<u32>,
) -> FileProjection {
    let fs_user = fs_user(pod);
    let fs_group = pod::spec(pod).security_context.as_ref().and_then(|context| context.fs_group);
    let private = fs_user.is_some() || fs_group.is_some();
    FileProjection {
        data: content.as_bytes().to_vec(),
        mode: if private { 0o600 } else { mode(default_mode) },
        owner: owner.or(fs_user.and_then(|u| u32::try_from(u).ok())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    fn listing(payload: Result<Payload, String>) -> Result<Vec<(String, String, u32)>, String> {
        payload.map(|p| {
            p.into_iter().map(|(k, f)| (k, String::from_utf8_lossy(&f.data).into_owned(), f.mode)).collect()
        })
    }

    fn items(value: Value) -> Vec<KeyToPath> {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn keys_become_files_by_name_or_by_item() {
        let map: ConfigMap =
            serde_json::from_value(json!({"data": {"a": "1", "b": "2"}, "binaryData": {"c": "Mw=="}}))
                .unwrap();
        let how = |items: Option<&'static [KeyToPath]>, optional| KeySelection {
            items,
            default_mode: Some(0o640),
            optional,
            owners: FileOwners::default(),
        };
        let file = |p: &str, d: &str, m: u32| (p.to_owned(), d.to_owned(), m);
        assert_eq!(
            listing(config_map(Some(&map), how(None, false))).unwrap(),
            [file("a", "1", 0o640), file("b", "2", 0o640), file("c", "3", 0o640)]
        );
        let picked = items(json!([{"key": "a", "path": "x/y", "mode": 0o400}, {"key": "none", "path": "z"}]));
        let picked: &'static [KeyToPath] = picked.leak();
        assert_eq!(
            listing(config_map(Some(&map), how(Some(picked), true))).unwrap(),
            [file("x/y", "1", 0o400)]
        );
        assert_eq!(
            listing(config_map(Some(&map), how(Some(picked), false))).unwrap_err(),
            "configmap references non-existent config key: none"
        );
        assert_eq!(listing(config_map(None, how(Some(picked), true))).unwrap(), []);
        let secret_object: Secret = serde_json::from_value(json!({"data": {"p": "eA=="}})).unwrap();
        assert_eq!(listing(secret(Some(&secret_object), how(None, false))).unwrap(), [file("p", "x", 0o640)]);
        assert_eq!(
            listing(secret(Some(&secret_object), how(Some(picked), false))).unwrap_err(),
            "references non-existent secret key: a"
        );
        let bare =
            KeySelection { items: None, default_mode: None, optional: false, owners: FileOwners::default() };
        assert_eq!(
            listing(secret(None, bare)).unwrap_err(),
            "no defaultMode used, not even the default value for it"
        );
    }

    #[test]
    fn the_downward_api_reports_all_that_is_wrong() {
        let p = pod_of(json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "250m"}}}]}));
        let ask = |value: Value| {
            let items: Vec<DownwardAPIVolumeFile> = serde_json::from_value(value).unwrap();
            let owners = FileOwners::default();
            listing(downward_api(&p, &items, Some(0o644), owners, &NodeSettings::default()))
        };
        let got = ask(json!([{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}, "mode": 0o600},
            {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "requests.cpu", "divisor": "1m"}}]));
        assert_eq!(got.unwrap(), [("cpu".into(), "250".into(), 0o644), ("name".into(), "web".into(), 0o600)]);
        let bad = json!([{"path": "a", "fieldRef": {"fieldPath": "x"}}, {"path": "b", "fieldRef": {"fieldPath": "y"}}]);
        assert_eq!(ask(bad).unwrap_err(), "[unsupported fieldPath: x, unsupported fieldPath: y]");
    }

    #[test]
    fn files_of_the_downward_api_that_are_too_large_together_are_not_all_in_memory() {
        let mut p = pod_of(json!({"containers": [{"name": "c"}]}));
        p.metadata.annotations = Some([("large".to_owned(), "x".repeat(256 << 10))].into());
        let files = |many: usize| {
            let file = |n| {
                let field = json!({"fieldPath": "metadata.annotations['large']"});
                json!({"path": format!("f{n}"), "fieldRef": field})
            };
            let items: Vec<DownwardAPIVolumeFile> =
                serde_json::from_value((0..many).map(file).collect()).unwrap();
            let made = downward_api(&p, &items, Some(0o644), FileOwners::default(), &NodeSettings::default());
            made.map(|files| files.len())
        };
        assert_eq!(files(512), Ok(512));
        assert_eq!(files(513), Err(too_large(MAX_FILE_BYTES)));
    }

    #[test]
    fn a_token_file_is_owned_by_the_common_user_of_all_containers() {
        let user = |spec: Value| fs_user(&pod_of(spec));
        let c = |uid: Value| json!({"name": "c", "securityContext": {"runAsUser": uid}});
        assert_eq!(user(json!({"containers": [c(json!(5)), c(json!(5))]})), Some(5));
        assert_eq!(user(json!({"containers": [c(json!(5)), c(json!(6))]})), None);
        assert_eq!(user(json!({"containers": [c(json!(5)), c(json!(null))]})), None);
        assert_eq!(
            user(json!({"securityContext": {"runAsUser": 5}, "containers": [c(json!(null))]})),
            Some(5)
        );
        assert_eq!(user(json!({"containers": [c(json!(5))], "initContainers": [c(json!(1))]})), None);
        let file = |context: Value| {
            let pod = pod_of(json!({"securityContext": context, "containers": [{"name": "c"}]}));
            private_file(&pod, "t", 0o644, None)
        };
        assert_eq!(file(json!({})).mode, 0o644);
        assert_eq!(file(json!({"fsGroup": 7})).mode, 0o600);
        let owned = file(json!({"runAsUser": 7}));
        assert_eq!((owned.mode, owned.owner), (0o600, Some(7)));
    }

    #[test]
    fn files_belong_to_their_user_or_to_that_of_their_volume_with_the_feature_gate() {
        let owners = |payload: Result<Payload, String>| -> Vec<(String, Option<u32>)> {
            payload.unwrap().into_iter().map(|(path, file)| (path, file.owner)).collect()
        };
        let listed = |list: &[(&str, Option<u32>)]| -> Vec<(String, Option<u32>)> {
            list.iter().map(|(path, owner)| ((*path).to_owned(), *owner)).collect()
        };
        let map: ConfigMap = serde_json::from_value(json!({"data": {"a": "1", "b": "2"}})).unwrap();
        let secret_object: Secret =
            serde_json::from_value(json!({"data": {"a": "eA==", "b": "eA=="}})).unwrap();
        let keys = items(json!([{"key": "a", "path": "a", "user": 0}, {"key": "b", "path": "b"}]));
        let files: Vec<DownwardAPIVolumeFile> = serde_json::from_value(json!([
            {"path": "a", "fieldRef": {"fieldPath": "metadata.name"}, "user": 0},
            {"path": "b", "fieldRef": {"fieldPath": "metadata.name"}},
        ]))
        .unwrap();
        let pod = pod_of(json!({"securityContext": {"runAsUser": 7}, "containers": [{"name": "c"}]}));
        for (is_enabled, default_user, want) in [
            (true, Some(1000), [("a", Some(0)), ("b", Some(1000))]),
            (true, None, [("a", Some(0)), ("b", None)]),
            (false, Some(1000), [("a", None), ("b", None)]),
        ] {
            let how = FileOwners { is_enabled, default_user };
            let selection =
                KeySelection { items: Some(&keys), default_mode: Some(0o644), optional: false, owners: how };
            assert_eq!(owners(config_map(Some(&map), selection)), listed(&want));
            assert_eq!(owners(secret(Some(&secret_object), selection)), listed(&want));
            let node = NodeSettings::default();
            assert_eq!(owners(downward_api(&pod, &files, Some(0o644), how, &node)), listed(&want));
            let token = |user| private_file(&pod, "t", 0o644, how.owner(user)).owner;
            let tokens = [token(Some(0)), token(None)];
            assert_eq!(
                tokens,
                want.map(|(_, owner)| owner.or(Some(7))),
                "the user of all containers is last"
            );
        }
        let all = KeySelection {
            items: None,
            default_mode: Some(0o644),
            optional: false,
            owners: FileOwners { is_enabled: true, default_user: Some(5) },
        };
        assert_eq!(owners(config_map(Some(&map), all)), listed(&[("a", Some(5)), ("b", Some(5))]));
    }
}
