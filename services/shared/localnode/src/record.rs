//! The record of an instance, in its directory.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::cleanup::Traces;
use crate::cni::Names;

const FILE: &str = "node.json";

/// The record of an instance, for processes that do not own it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) index: u8,
    pub(crate) keep_pods: bool,
    pub(crate) socket: PathBuf,
    pub(crate) owned: Vec<PathBuf>,
}

impl Record {
    pub(crate) fn read(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(dir.join(FILE)).ok()?).ok()
    }

    pub(crate) fn write(&self, dir: &Path) -> Result<(), Error> {
        let path = dir.join(FILE);
        std::fs::write(&path, serde_json::to_vec(self).unwrap_or_default())
            .map_err(Error::file("write", &path))
    }

    /// Returns the data by which the traces of the instance in `dir` are found.
    pub(crate) fn traces(&self, dir: &Path) -> Traces {
        Traces {
            dir: dir.to_path_buf(),
            socket: self.socket.clone(),
            owned: self.owned.clone(),
            names: Names::new(self.index),
        }
    }
}
