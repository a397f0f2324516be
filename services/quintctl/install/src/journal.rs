//! The journal of an installation: its steps, and how many of them have begun. It is written before a step
//! begins and after a step is undone, so that a kill at any time leaves all that has to be undone.

use std::io;
use std::path::Path;

use quintlet_kit::atomic_file;
use serde::{Deserialize, Serialize};

use crate::error::InstallError;
use crate::machine::Machine;
use crate::plan::InstallPlan;
use crate::steps::InstallStep;

/// Version of the form of the journal.
const VERSION: u32 = 1;

/// Only root may read the journal, since it alone uses it.
const MODE: u32 = 0o600;

/// The journal of an installation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Journal {
    version: u32,
    /// Whether the installation created the directory of the journal.
    made_directory: bool,
    /// Number of steps that have begun and are not undone.
    begun: usize,
    plan: InstallPlan,
}

impl Journal {
    /// Creates the journal of a plan of which no step has begun.
    pub(crate) fn create(plan: InstallPlan, machine: &Machine) -> Result<Self, InstallError> {
        let path = machine.journal();
        let directory = path.parent().unwrap_or(Path::new("/"));
        let made_directory = match std::fs::create_dir(machine.path(directory)) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(source) => {
                return Err(InstallError::File { action: "create", path: directory.to_owned(), source });
            }
        };
        let journal = Self { version: VERSION, made_directory, begun: 0, plan };
        journal.write(machine)?;
        Ok(journal)
    }

    /// Reads the journal, or returns none if there is no installation.
    pub(crate) fn read(machine: &Machine) -> Result<Option<Self>, InstallError> {
        let path = machine.journal();
        let bytes = match std::fs::read(machine.path(&path)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(InstallError::File { action: "read", path, source }),
        };
        let journal: Option<Self> = serde_json::from_slice(&bytes).ok();
        let journal = journal.filter(|journal| journal.version == VERSION);
        journal.map(Some).ok_or(InstallError::Journal(path))
    }

    /// Returns the steps that have begun.
    pub(crate) fn begun(&self) -> &[InstallStep] {
        self.plan.steps.get(..self.begun).unwrap_or(&self.plan.steps)
    }

    /// Returns the next step.
    pub(crate) fn next(&self) -> Option<&InstallStep> {
        self.plan.steps.get(self.begun)
    }

    /// Returns the number of steps of the plan.
    pub(crate) fn len(&self) -> usize {
        self.plan.steps.len()
    }

    /// Records that `begun` steps have begun.
    pub(crate) fn set_begun(&mut self, begun: usize, machine: &Machine) -> Result<(), InstallError> {
        self.begun = begun;
        self.write(machine)
    }

    /// Removes the journal, and its directory if the installation created it and it is empty.
    pub(crate) fn remove(self, machine: &Machine) -> Result<(), InstallError> {
        let path = machine.journal();
        let removed = std::fs::remove_file(machine.path(&path));
        removed.map_err(|source| InstallError::File { action: "remove", path: path.clone(), source })?;
        if self.made_directory
            && let Some(directory) = path.parent()
        {
            // The services may have written into it.
            let _ = std::fs::remove_dir(machine.path(directory));
        }
        Ok(())
    }

    fn write(&self, machine: &Machine) -> Result<(), InstallError> {
        let path = machine.journal();
        let failed = |source: io::Error| InstallError::File { action: "write", path: path.clone(), source };
        let bytes = serde_json::to_vec_pretty(self).map_err(|error| failed(error.into()))?;
        atomic_file::write_durable(&machine.path(&path), &bytes, MODE).map_err(failed)
    }
}
