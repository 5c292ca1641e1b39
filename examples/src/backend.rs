//! Who computes: a name on the command line becomes a type.
//!
//! A program for one backend needs nothing of this: it names its backend, and its group is [`ProcessGroup::from_env`].

use burn::tensor::backend::Backend;
use burn_ddp::{Ddp, Error, ProcessGroup, Result};
use burn_flex::Flex;
use burn_ndarray::NdArray;
use clap::ValueEnum;

/// A backend by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// Burn's CPU backend
    Flex,
    /// The older CPU backend
    Ndarray,
    // There without the feature as well: "built without it" helps, "not a possible value" does not.
    /// An NVIDIA GPU for each process, gradients reduced by NCCL; in a build with `--features cuda`
    Cuda,
}

impl BackendName {
    /// # Errors
    /// A configuration error when the program was built without the backend.
    pub fn check(self) -> Result<()> {
        if self == Self::Cuda && cfg!(not(feature = "cuda")) {
            return Err(Error::config(
                "--backend cuda: this program was built without it; build with --features cuda",
            ));
        }
        Ok(())
    }

    /// Runs `program` on this backend.
    ///
    /// # Errors
    /// Those of [`check`](Self::check) and of the program.
    pub fn run(self, program: impl Program) -> Result<()> {
        match self {
            Self::Flex => program.run::<Flex>(),
            Self::Ndarray => program.run::<NdArray>(),
            #[cfg(feature = "cuda")]
            Self::Cuda => program.run::<burn_cuda::Cuda>(),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => self.check(),
        }
    }
}

/// A program that is written for any backend.
pub trait Program {
    /// Runs it as one rank.
    ///
    /// # Errors
    /// Whatever ends the program.
    fn run<B: Trains>(self) -> Result<()>;
}

/// A backend, and how its ranks find their device and each other. `group.device()` is the device from then on.
pub trait Trains: Backend {
    /// The group of this process, made for the device that its rank drives.
    ///
    /// # Errors
    /// What the environment describes wrongly, peers that do not appear, and a device that is not there.
    fn begin() -> Result<ProcessGroup<Ddp<Self>>>;
}

impl Trains for Flex {
    fn begin() -> Result<ProcessGroup<Ddp<Self>>> {
        ProcessGroup::from_env(&Default::default())
    }
}

impl Trains for NdArray {
    fn begin() -> Result<ProcessGroup<Ddp<Self>>> {
        ProcessGroup::from_env(&Default::default())
    }
}

#[cfg(feature = "cuda")]
impl Trains for burn_cuda::Cuda {
    fn begin() -> Result<ProcessGroup<Ddp<Self>>> {
        let device = burn_ddp_nccl::local_device::<Self>()?;
        burn_ddp_nccl::process_group::<Ddp<Self>>(&device)
    }
}
