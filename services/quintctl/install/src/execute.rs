//! Does the steps of a plan, and undoes them.

use std::io::Write;
use std::path::PathBuf;

use crate::error::InstallError;
use crate::journal::Journal;
use crate::machine::Machine;
use crate::output::print;
use crate::plan::InstallPlan;

/// An installation in progress.
pub(crate) struct Execution<'a> {
    journal: Journal,
    machine: &'a Machine,
}

impl<'a> Execution<'a> {
    /// Writes the journal.
    pub(crate) fn begin(plan: InstallPlan, machine: &'a Machine) -> Result<Self, InstallError> {
        Ok(Self { journal: Journal::create(plan, machine)?, machine })
    }

    /// Removes the journal: what was done needs no undo.
    pub(crate) fn finish(self) -> Result<(), InstallError> {
        self.journal.remove(self.machine)
    }

    /// Does the next step and prints it. Returns false after the last one. If the step fails, it and the
    /// steps before it are undone.
    pub(crate) fn advance(&mut self, out: &mut dyn Write) -> Result<bool, InstallError> {
        let Some(step) = self.journal.next().cloned() else { return Ok(false) };
        let number = self.journal.begun().len().saturating_add(1);
        let line = format!("{number}/{} {} … ", self.journal.len(), step.text());
        // A closed standard output must not end an installation in the middle.
        let _ = print(out, &line);
        let began = self.journal.set_begun(number, self.machine);
        match began.and_then(|()| step.apply(self.machine)) {
            Ok(()) => {
                let _ = print(out, "done\n");
                Ok(true)
            }
            Err(cause) => {
                let _ = print(out, "failed\n");
                match undo(self.journal.clone(), self.machine, out) {
                    Ok(_) => Err(InstallError::Undone { step: step.text(), cause: Box::new(cause) }),
                    Err(InstallError::NotUndone(mut causes)) => {
                        causes.insert(0, format!("{}: {}", step.text(), quintlet_kit::error_chain(&cause)));
                        Err(InstallError::NotUndone(causes))
                    }
                    Err(other) => Err(other),
                }
            }
        }
    }
}

/// Undoes all steps that have begun, the last one first, and removes the journal. Returns the directories
/// that are kept.
///
/// A step that cannot be undone does not stop the others: a node without an agent is worse than a file that
/// is left. The journal then stays, for another attempt at all of them.
pub(crate) fn undo(
    mut journal: Journal,
    machine: &Machine,
    out: &mut dyn Write,
) -> Result<Vec<PathBuf>, InstallError> {
    let mut failures = Vec::new();
    let mut kept = Vec::new();
    let begun = journal.begun().to_vec();
    for (index, step) in begun.iter().enumerate().rev() {
        match step.undo(machine) {
            Ok(directory) => {
                kept.extend(directory);
                if step.has_undo() {
                    // A closed standard output must not end it in the middle.
                    let _ = print(out, &format!("{} … done\n", step.undo_text()));
                }
                if failures.is_empty()
                    && let Err(error) = journal.set_begun(index, machine)
                {
                    failures.push(quintlet_kit::error_chain(&error));
                }
            }
            Err(error) => {
                let _ = print(out, &format!("{} … failed\n", step.undo_text()));
                failures.push(quintlet_kit::error_chain(&error));
            }
        }
    }
    if !failures.is_empty() {
        return Err(InstallError::NotUndone(failures));
    }
    journal.remove(machine)?;
    Ok(kept)
}
