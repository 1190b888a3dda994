// The multiplications by weights in codes.
#include "../path.h"

namespace CL_NS {

CL_CODE_PRODUCT(Q8, 1);
CL_CODE_PRODUCT(Q8, 2);
CL_CODE_PRODUCT(Q4, 1);
CL_CODE_PRODUCT(Q4, 2);
CL_CODE_PRODUCT(Q8Min, 1);
CL_CODE_PRODUCT(Q8Min, 2);
CL_CODE_PRODUCT(Q4Min, 1);
CL_CODE_PRODUCT(Q4Min, 2);
CL_CODE_PRODUCT(FourBitFloat, 1);
CL_CODE_PRODUCT(FourBitFloat, 2);
#if defined(CL_TILE_CODES)
CL_CODE_TILES(Q8);
CL_CODE_TILES(Q4);
CL_CODE_TILES(Q8Min);
CL_CODE_TILES(Q4Min);
CL_CODE_TILES(FourBitFloat);
#endif

}  // namespace CL_NS
