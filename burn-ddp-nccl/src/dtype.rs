//! NCCL's numbers for element types and reductions.

use std::ffi::c_int;

use burn_ddp::{DType, ReduceOp};

/// `ncclDataType_t`.
pub(crate) fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

/// `ncclRedOp_t`.
pub(crate) fn reduction(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Mean => 4,
    }
}

#[cfg(test)]
mod tests {
    use cudarc::nccl::sys::{ncclDataType_t as Type, ncclRedOp_t as Op};

    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        let types = DType::ALL.map(|dtype| match dtype {
            DType::U8 => Type::ncclUint8,
            DType::I32 => Type::ncclInt32,
            DType::I64 => Type::ncclInt64,
            DType::F16 => Type::ncclFloat16,
            DType::BF16 => Type::ncclBfloat16,
            DType::F32 => Type::ncclFloat32,
            DType::F64 => Type::ncclFloat64,
        });
        assert_eq!(DType::ALL.map(data_type), types.map(|number| number as c_int));
        let ops = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];
        let numbers = [Op::ncclSum, Op::ncclAvg, Op::ncclMin, Op::ncclMax];
        assert_eq!(ops.map(reduction), numbers.map(|number| number as c_int));
    }
}
