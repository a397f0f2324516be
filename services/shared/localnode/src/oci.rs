//! OCI image archives with one layer, from a description. Equal descriptions result in equal bytes and
//! digests.

use std::io;

use serde_json::json;
use sha2::{Digest as _, Sha256};

/// The type of an entry in an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageEntryKind {
    /// A file with its content.
    File(Vec<u8>),
    /// A symbolic link to this target.
    Symlink(String),
    /// A directory.
    Dir,
}

/// An entry in an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageEntry {
    /// Path without a leading slash.
    pub path: String,
    /// Type and content of the entry.
    pub node: ImageEntryKind,
    /// Permission bits.
    pub mode: u32,
}

/// An image. Parents of entries may be omitted. A parent that is listed precedes its children.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// Full reference, such as `localhost/busybox:1`.
    pub name: String,
    /// Content of the layer.
    pub entries: Vec<ImageEntry>,
    /// Command of the image.
    pub entrypoint: Vec<String>,
    /// Default arguments of the command.
    pub cmd: Vec<String>,
    /// Environment variables, as `NAME=value`.
    pub env: Vec<String>,
    /// User, or user:group; empty for root.
    pub user: String,
    /// Exposed ports, such as `80/tcp`.
    pub exposed: Vec<String>,
}

const MEDIA_INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MEDIA_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const MEDIA_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MEDIA_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Creation time of every image. A fixed one keeps the digests equal.
const CREATED: &str = "1970-01-01T00:00:00Z";

impl Image {
    /// Returns the archive: an OCI layout in a tar, for `ctr image import` and [`crate::import`].
    ///
    /// # Errors
    /// Fails if a path does not fit into a tar.
    pub fn archive(&self) -> io::Result<Vec<u8>> {
        let layer = self.layer()?;
        let exposed: serde_json::Map<_, _> = self.exposed.iter().map(|p| (p.clone(), json!({}))).collect();
        let config = json!({
            "created": CREATED,
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "User": self.user,
                "ExposedPorts": exposed,
                "Env": self.env,
                "Entrypoint": self.entrypoint,
                "Cmd": self.cmd,
            },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)] },
            "history": [{ "created": CREATED, "created_by": "quintlet-localnode" }],
        })
        .to_string()
        .into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MEDIA_MANIFEST,
            "config": descriptor(MEDIA_CONFIG, &config),
            "layers": [descriptor(MEDIA_LAYER, &layer)],
        })
        .to_string()
        .into_bytes();
        let mut in_index = descriptor(MEDIA_MANIFEST, &manifest);
        in_index["platform"] = json!({ "architecture": architecture(), "os": "linux" });
        in_index["annotations"] = json!({
            "io.containerd.image.name": self.name,
            "org.opencontainers.image.ref.name": tag(&self.name),
        });
        let index = json!({ "schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": [in_index] });

        let mut tar = tar::Builder::new(Vec::new());
        file(&mut tar, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        file(&mut tar, "index.json", 0o644, index.to_string().as_bytes())?;
        for blob in [&manifest, &config, &layer] {
            let path = format!("blobs/{}", digest(blob).replace(':', "/"));
            file(&mut tar, &path, 0o644, blob)?;
        }
        tar.into_inner()
    }

    fn layer(&self) -> io::Result<Vec<u8>> {
        let mut tar = tar::Builder::new(Vec::new());
        for entry in &self.entries {
            match &entry.node {
                ImageEntryKind::File(bytes) => file(&mut tar, &entry.path, entry.mode, bytes)?,
                ImageEntryKind::Symlink(target) => {
                    let mut header = header(entry.mode, 0);
                    header.set_entry_type(tar::EntryType::Symlink);
                    tar.append_link(&mut header, &entry.path, target)?;
                }
                ImageEntryKind::Dir => {
                    let mut header = header(entry.mode, 0);
                    header.set_entry_type(tar::EntryType::Directory);
                    tar.append_data(&mut header, &entry.path, io::empty())?;
                }
            }
        }
        tar.into_inner()
    }
}

/// Returns the digest of bytes, as `sha256:…`.
pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Returns this machine's architecture under Go's name, which OCI uses.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

fn descriptor(media_type: &str, bytes: &[u8]) -> serde_json::Value {
    json!({ "mediaType": media_type, "digest": digest(bytes), "size": bytes.len() })
}

/// Returns the tag of a name. A port after the last colon is not a tag.
fn tag(name: &str) -> &str {
    name.rsplit_once(':').map(|(_, tag)| tag).filter(|tag| !tag.contains('/')).unwrap_or("latest")
}

fn header(mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

fn file(tar: &mut tar::Builder<Vec<u8>>, path: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
    let mut header = header(mode, bytes.len() as u64);
    header.set_entry_type(tar::EntryType::Regular);
    tar.append_data(&mut header, path, bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use super::*;

    fn entries(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        tar::Archive::new(archive)
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes).unwrap();
                (entry.path().unwrap().display().to_string(), bytes)
            })
            .collect()
    }

    #[test]
    fn every_digest_in_an_archive_leads_to_its_blob() {
        let entry = |path: &str, node, mode| ImageEntry { path: path.into(), node, mode };
        let images = [
            Image { name: "localhost/empty:1".into(), ..Image::default() },
            Image {
                name: "localhost:5000/full".into(),
                entries: vec![
                    entry("tmp", ImageEntryKind::Dir, 0o1777),
                    entry("bin/tool", ImageEntryKind::File(b"#!tool".to_vec()), 0o755),
                    entry("bin/alias", ImageEntryKind::Symlink("tool".into()), 0o777),
                ],
                entrypoint: vec!["/bin/tool".into()],
                cmd: vec!["-x".into()],
                env: vec!["A=b".into()],
                user: "1000:1000".into(),
                exposed: vec!["80/tcp".into()],
            },
        ];
        for image in images {
            let archive = image.archive().unwrap();
            assert_eq!(archive, image.archive().unwrap(), "not reproducible");
            let files = entries(&archive);
            for (path, bytes) in &files {
                if let Some(hash) = path.strip_prefix("blobs/sha256/") {
                    assert_eq!(digest(bytes), format!("sha256:{hash}"));
                }
            }
            let blob = |descriptor: &serde_json::Value| {
                let digest = descriptor["digest"].as_str().unwrap();
                let bytes = &files[&format!("blobs/{}", digest.replace(':', "/"))];
                assert_eq!(descriptor["size"].as_u64(), Some(bytes.len() as u64));
                bytes.clone()
            };
            let index: serde_json::Value = serde_json::from_slice(&files["index.json"]).unwrap();
            let in_index = &index["manifests"][0];
            assert_eq!(in_index["annotations"]["io.containerd.image.name"], image.name);
            let manifest: serde_json::Value = serde_json::from_slice(&blob(in_index)).unwrap();
            let config: serde_json::Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
            let layer = blob(&manifest["layers"][0]);
            assert_eq!(config["rootfs"]["diff_ids"][0], digest(&layer));
            assert_eq!(config["config"]["User"], image.user);
            assert_eq!(entries(&layer).len(), image.entries.len());
        }
    }

    #[test]
    fn a_port_is_not_a_tag() {
        for (name, want) in
            [("localhost/a:1", "1"), ("localhost:5000/a", "latest"), ("localhost:5000/a:v2", "v2")]
        {
            assert_eq!(tag(name), want, "{name}");
        }
    }
}
