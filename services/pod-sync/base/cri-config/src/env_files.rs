//! The files that variables of a container refer to (`fileKeyRef`).
//!
//! Containers of the pod write these files, so they are read on a blocking thread, before the environment is
//! computed.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, FileKeySelector, Pod};
use quintlet_model::pod;

use super::env_file::EnvFile;
use super::error::ConfigError;
use super::expand::Budget;
use super::subpath::read_beneath;

/// The variable files of a container, by volume and path. Each is read once, however many variables refer to
/// it.
#[derive(Debug, Default)]
pub struct EnvFiles(BTreeMap<(String, String), Result<Option<EnvFile>, ConfigError>>);

impl EnvFiles {
    /// Returns whether a variable of the container refers to a file.
    #[must_use]
    pub fn are_used(container: &Container) -> bool {
        references(container).next().is_some()
    }

    /// Reads the files that variables of the container refer to, up to the first error. `volume_paths` has
    /// the paths of the pod's volumes. Blocks.
    #[must_use]
    pub fn read(pod: &Pod, container: &Container, volume_paths: &BTreeMap<String, PathBuf>) -> Self {
        let mut budget = Budget::new("the files of fileKeyRef");
        let volumes = pod::spec(pod).volumes.iter().flatten();
        let empty_dirs: BTreeSet<&str> =
            volumes.filter(|v| v.empty_dir.is_some()).map(|v| v.name.as_str()).collect();
        let mut files = BTreeMap::new();
        for r in references(container).filter(|r| empty_dirs.contains(r.volume_name.as_str())) {
            let Some(root) = volume_paths.get(&r.volume_name) else { continue };
            let Entry::Vacant(place) = files.entry((r.volume_name.clone(), r.path.clone())) else { continue };
            if place.insert(read(root, &r.path, &mut budget)).is_err() {
                break;
            }
        }
        Self(files)
    }

    /// Returns the value of a key, or `None` if it has none and is optional. An error of the file is returned
    /// once.
    pub(super) fn value(&mut self, r: &FileKeySelector) -> Result<Option<Vec<u8>>, ConfigError> {
        let place = (r.volume_name.clone(), r.path.clone());
        let read = self.0.remove(&place).ok_or_else(|| {
            ConfigError::invalid(format!(
                "cannot find the volume {:?} referenced by FileKeyRef",
                r.volume_name
            ))
        })?;
        let file = read?;
        let value = match file.as_ref().map(|file| file.get(&r.key)) {
            Some(Ok(Some(value))) if !value.is_empty() => Ok(Some(value.to_vec())),
            Some(Err(line)) => Err(ConfigError::invalid(format!("couldn't parse env file: line {line}"))),
            None | Some(Ok(_)) if r.optional.unwrap_or(false) => Ok(None),
            None | Some(Ok(_)) => Err(ConfigError::invalid(format!(
                "environment variable key {:?} not found in file {:?}",
                r.key, r.path
            ))),
        };
        self.0.insert(place, Ok(file));
        value
    }
}

// A variable with a value of its own has no other source.
fn references(container: &Container) -> impl Iterator<Item = &FileKeySelector> {
    let without_value = |value: Option<&str>| value.unwrap_or_default().is_empty();
    let variables = container.env.iter().flatten().filter(move |var| without_value(var.value.as_deref()));
    variables.filter_map(|var| var.value_from.as_ref()?.file_key_ref.as_ref())
}

/// Returns `None` if the file does not exist.
fn read(root: &Path, path: &str, budget: &mut Budget) -> Result<Option<EnvFile>, ConfigError> {
    match read_beneath(root, path) {
        Ok(bytes) => {
            budget.take(bytes.len())?;
            Ok(Some(EnvFile::parse(&bytes)))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(ConfigError::io("couldn't parse env file", e)),
    }
}
